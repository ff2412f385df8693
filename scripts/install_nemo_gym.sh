#!/usr/bin/env bash
# Install NeMo Gym into a virtual environment of its own, for scripts/nemo_gym_server.py and the tests of its adapter.
#
#   scripts/install_nemo_gym.sh [FOLDER]        default: mtrl/nemo_gym in the user's cache folder
#
# A finished installation is not repeated; the last line of the output is the interpreter for MTRL_NEMO_GYM_PYTHON. PYTHON
# names the interpreter that makes the environment, which must be 3.12 or newer; without it, the script takes the first
# such one of PATH and of pyenv's versions. NeMo Gym 0.5 and later need Python 3.13.14.
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/nemo_gym}
version=0.4.0

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if ! [ -e "$folder/installed-$version" ] || ! "$folder/bin/python" -c "" 2>/dev/null; then
    python=
    for each in ${PYTHON:-python3 python3.12 python3.13 python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python}; do
        if new_enough "$each"; then
            python=$each
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "NeMo Gym needs Python 3.12 or newer; set PYTHON to one" >&2
        exit 1
    fi
    "$python" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --quiet "nemo-gym==$version"
    touch "$folder/installed-$version"
fi
echo "$folder/bin/python"
