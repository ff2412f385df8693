#!/usr/bin/env bash
# Make a virtual environment and install this project into it.
#
#   scripts/install.sh [EXTRA ...]        e.g. scripts/install.sh dev wandb
#
#   VENV=.venv              where
#   PYTHON=python3.12       with which Python, 3.11 or later (default: the first one found)
#   TORCH="torch==2.13.0"   which PyTorch: it comes first, so that the rest takes it as it is (default: that of the engine
#                           in .venv-vllm or .venv-sglang, since NCCL refuses different versions; else vLLM's)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
extras=$(IFS=,; echo "$*")

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "mtrl needs Python 3.11 or later, and ${PYTHON:-python3} is older or missing; install one," >&2
    echo "or name one that is elsewhere: PYTHON=/path/to/python3.12" >&2
    return 1
}

torch_of_engine() {
    local found
    for found in .venv-{vllm,sglang}/lib/python3*/site-packages/torch-[0-9]*.dist-info; do
        if [ -d "$found" ]; then
            found=${found##*/torch-}
            found=${found%.dist-info}
            echo "torch==${found%%+*}" # without the name of the build, such as +cpu
            return
        fi
    done
    sed -n 's/^\(torch==[^ ;]*\).*/\1/p' requirements/vllm.txt
}

torch=${TORCH:-$(torch_of_engine)}
if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -m venv "$venv" || {
        echo "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
fi
echo "installing mtrl${extras:+[$extras]} and $torch into $venv; this takes a minute or two"
"$venv/bin/python" scripts/pip_or_uv.py "$torch"
"$venv/bin/python" -m pip uninstall --quiet --quiet --yes mtrl  # the distribution's earlier name
"$venv/bin/python" scripts/pip_or_uv.py --editable ".${extras:+[$extras]}"
if [[ ",$extras," == *,dev,* ]]; then
    "$venv/bin/python" scripts/pip_or_uv.py --no-deps --requirement requirements/dev.bare
fi
