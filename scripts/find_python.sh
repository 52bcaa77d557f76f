#!/usr/bin/env bash
# find_python.sh [3.N | --explain]
# Prints a Python on this machine that the project was tested with, of version 3.N where given; nothing if there is none.
# With --explain it says, on stderr, what was found and what is missing.
set -u

wanted="${1:-}"

# An interpreter fits when its version was tested (requires-python in pyproject.toml) and it can make an environment.
fits() {
    "$1" - "$wanted" 2>/dev/null <<'PYTHON'
import ensurepip, sys, venv
version, wanted = sys.version_info[:2], sys.argv[1]
sys.exit(not (3, 11) <= version < (3, 14) or (wanted.startswith("3.") and wanted != "%d.%d" % version))
PYTHON
}

# The default python3 first: it is what a user means. pyenv keeps others beside it without putting them on the path.
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
        echo "No Python from 3.11 to 3.13 that has venv was found. What is here:"
        for candidate in "${candidates[@]}"; do
            version=$("$candidate" --version 2>/dev/null) || continue
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null || version+=" (without venv)"
            echo "  $candidate: $version"
        done
        echo "Install one (Debian and Ubuntu: apt install python3 python3-venv), or say where it is:"
        echo "  make PYTHON=/path/to/python3.12 demo"
    } >&2
fi
exit 0
