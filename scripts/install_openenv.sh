#!/usr/bin/env bash
# Install OpenEnv into a virtual environment of its own that also sees the packages of mtrl's, for the tests of its adapter.
#
#   scripts/install_openenv.sh [FOLDER]         default: mtrl/openenv in the user's cache folder
#
# OpenEnv needs an older version of the package mcp than mtrl, so the two cannot share one environment. A finished
# installation is not repeated; the last line of the output is the interpreter that runs the tests. PYTHON names the
# interpreter of mtrl's environment (default: .venv/bin/python).
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/openenv}
python=${PYTHON:-.venv/bin/python}
version=0.10.0
installed=$folder/installed-$version-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if ! [ -e "$installed" ] || ! "$folder/bin/python" -c "" 2>/dev/null; then
    "$python" -m venv --clear "$folder" || {
        echo "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
    "$folder/bin/python" -m pip install --quiet "openenv==$version"
    touch "$installed"
fi
# The packages of mtrl's environment come after OpenEnv's own on the path. A later run may have another environment.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$packages" > "$("$folder/bin/python" -c "$packages")/zz_mtrl.pth"
echo "$folder/bin/python"
