#!/usr/bin/env bash
# find_python.sh [3.N | --explain]
# Print a Python of this machine that the project supports (of version 3.N if given), or nothing.
# With --explain, list the interpreters and their problems on stderr.
set -u

requested="${1:-}"

# An interpreter fits if its version is supported (requires-python in pyproject.toml) and it has venv.
fits() {
    "$1" - "$requested" 2>/dev/null <<'PYTHON'
import ensurepip, sys, venv
version, requested = sys.version_info[:2], sys.argv[1]
sys.exit(not (3, 11) <= version < (3, 14) or (requested.startswith("3.") and requested != "%d.%d" % version))
PYTHON
}

# The default python3 first. Other pyenv versions are not on the path.
candidates=(python3 python3.12 python3.13 python3.11)
for minor in 12 13 11; do
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python3)
done

for candidate in "${candidates[@]}"; do
    if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
        [ "$requested" = --explain ] || "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

if [ "$requested" = --explain ]; then
    {
        echo "No Python 3.11 to 3.13 with venv found. Interpreters:"
        for candidate in "${candidates[@]}"; do
            version=$("$candidate" --version 2>/dev/null) || continue
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null || version+=" (without venv)"
            echo "  $candidate: $version"
        done
        echo "Install one (Debian and Ubuntu: apt install python3 python3-venv), or give its path:"
        echo "  make PYTHON=/path/to/python3.12 demo"
    } >&2
fi
exit 0
