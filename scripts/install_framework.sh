#!/usr/bin/env bash
# Install another framework into a virtual environment of its own that also sees the packages of mtrl's, for the tests of
# the framework's adapter.
#
#   scripts/install_framework.sh openenv|verifiers [FOLDER]     default: mtrl/frameworks/NAME in the user's cache folder
#
# OpenEnv needs an older version of the package mcp than mtrl, and verifiers many packages, so they do not share mtrl's
# environment. A finished installation is not repeated; the last line of the output is the interpreter that runs the
# tests. PYTHON names the interpreter of mtrl's environment (default: .venv/bin/python).
set -euo pipefail

name=${1:-}
case "$name" in
    openenv) version=0.10.0 ;;
    verifiers) version=0.3.1 ;; # the last one with MultiTurnEnv
    *)
        echo "usage: scripts/install_framework.sh openenv|verifiers [FOLDER]" >&2
        exit 2
        ;;
esac
folder=${2:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/frameworks/$name}
python=${PYTHON:-.venv/bin/python}
installed=$folder/installed-$version-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
# The packages of mtrl's environment come after the framework's own on the path.
see_packages() { "$python" -c "$packages" > "$("$folder/bin/python" -c "$packages")/zz_mtrl.pth"; }

if ! [ -e "$installed" ] || ! "$folder/bin/python" -c "" 2>/dev/null; then
    "$python" -m venv --clear "$folder" || {
        echo "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
    see_packages
    "$folder/bin/python" -m pip install --quiet "$name==$version"
    touch "$installed"
fi
see_packages # a later run may have another environment
echo "$folder/bin/python"
