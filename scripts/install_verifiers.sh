#!/usr/bin/env bash
# Install verifiers into a virtual environment of its own, for examples/agents/verifiers_agent.py and its tests.
#
#   scripts/install_verifiers.sh [FOLDER]       default: mtrl/verifiers in the user's cache folder
#
# A finished installation is not repeated; the last line of the output is the interpreter for MTRL_VERIFIERS_PYTHON. PYTHON
# names the interpreter that makes the environment (default: python3), which must be 3.11 or newer.
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/verifiers}
version=0.4.0

if ! [ -e "$folder/installed-$version" ] || ! "$folder/bin/python" -c "" 2>/dev/null; then
    "${PYTHON:-python3}" -m venv --clear "$folder" || {
        echo "${PYTHON:-python3} cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
    "$folder/bin/python" -m pip install --quiet "verifiers==$version"
    touch "$folder/installed-$version"
fi
echo "$folder/bin/python"
