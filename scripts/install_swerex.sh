#!/usr/bin/env bash
# Install SWE-ReX into a virtual environment of its own, for the tests of environment.config.backend=swerex.
#
#   scripts/install_swerex.sh [FOLDER]          default: mtrl/swerex in the user's cache folder
#
# Only the servers need it: mtrl has a client of its own. A finished installation is not repeated; the last line of the
# output is the interpreter for MTRL_SWEREX_PYTHON. PYTHON names the interpreter that makes the environment (default:
# python3), which must be 3.10 or newer.
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/swerex}
version=1.4.0

if ! [ -e "$folder/installed-$version" ] || ! "$folder/bin/python" -c "" 2>/dev/null; then
    "${PYTHON:-python3}" -m venv --clear "$folder" || {
        echo "${PYTHON:-python3} cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
    "$folder/bin/python" -m pip install --quiet "swe-rex==$version"
    touch "$folder/installed-$version"
fi
echo "$folder/bin/python"
