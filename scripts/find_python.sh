#!/usr/bin/env bash
# find_python.sh [3.N | --explain]
# Print the path of a tested Python on this machine (of version 3.N, if given), or nothing.
# --explain lists the Pythons on stderr instead, if no tested one exists.
set -u

wanted="${1:-}"

# Tested versions: requires-python in pyproject.toml; ensurepip and venv must be installed.
fits() {
    "$1" - "$wanted" 2>/dev/null <<'PYTHON'
import ensurepip, sys, venv
version, wanted = sys.version_info[:2], sys.argv[1]
sys.exit(not (3, 11) <= version < (3, 14) or (wanted.startswith("3.") and wanted != "%d.%d" % version))
PYTHON
}

# The default python3 comes first. pyenv installs further versions outside of PATH.
candidates=(python3 python3.12 python3.13 python3.11)
for minor in 12 13 11; do
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3)
done

for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
        [ "$wanted" = --explain ] || "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

if [ "$wanted" = --explain ]; then
    {
        echo "No Python 3.11 to 3.13 with venv found. Installed:"
        for candidate in "${candidates[@]}"; do
            version=$("$candidate" --version 2>/dev/null) || continue
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null || version+=" (without venv)"
            echo "  $candidate: $version"
        done
        echo "Install one (Debian and Ubuntu: apt install python3 python3-venv), or pass its path:"
        echo "  make PYTHON=/path/to/python3.12 demo"
    } >&2
fi
exit 0
