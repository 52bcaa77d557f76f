#!/usr/bin/env bash
# Run a command with the kernels of a processor: with_instructions.sh default|avx2|avx512 COMMAND...
# Without arguments, print the sets that this host offers, none if it is not an x86-64.
# The variables limit torch's own kernels, oneDNN and MKL; other libraries (sentencepiece, numpy) are not limited.
set -eu
if [ $# -eq 0 ]; then
    for pair in default:sse4_1 avx2:avx2 avx512:avx512f; do
        ! grep -qw "${pair#*:}" /proc/cpuinfo || echo "${pair%:*}"
    done
    exit 0
fi
set=$1
shift
case $set in
default) limits=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2) ;;
avx2) limits=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2) ;;
avx512) limits=(ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512) ;;
*) echo "with_instructions.sh: unknown set $set; write default, avx2 or avx512" >&2 && exit 2 ;;
esac
exec env "${limits[@]}" "$@"
