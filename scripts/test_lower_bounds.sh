#!/usr/bin/env bash
# Run the fast tests of ranks, models and updates with the oldest PyTorch and Transformers that are supported
# (requirements/lower-bounds.txt), in an environment of its own, which is kept for the next call.
#
#   TORCH=torch==2.11.0+cpu    which PyTorch: a CPU build, from the index that pip is configured with
#   VENV=FOLDER                where (default: in the cache)
#
# If the index has no CPU build of that PyTorch, the oldest Transformers is tested with the PyTorch of scripts/install.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

bounds=requirements/lower-bounds.txt
oldest=$(sed -n 's/^torch==//p' "$bounds")
venv=${VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/mtrl/lower-bounds}
stamp=$venv/$(cat "$bounds" setup.py | cksum | cut -d ' ' -f 1)
tests=(
    tests/distributed/test_sharding.py tests/models/test_logprobs.py tests/models/test_attention.py
    tests/models/test_value_head.py tests/trainer/test_optimizer.py tests/trainer/test_policy.py
    tests/trainer/test_loading.py tests/engines/test_local_cache.py
)

if [ ! -e "$stamp" ]; then
    rm -rf "$venv"
    TORCH=${TORCH:-torch==$oldest+cpu}
    if ! python3 -m pip download --quiet --no-deps --dest "$(mktemp -d)" "$TORCH" 2> /dev/null; then
        echo "lower bounds: the package index has no $TORCH; the PyTorch of scripts/install.sh is used instead" >&2
        unset TORCH
    fi
    VENV=$venv scripts/install.sh lora
    "$venv/bin/python" -m pip install --quiet pytest pytest-xdist hypothesis "$(grep '^transformers==' "$bounds")"
    touch "$stamp"
fi
"$venv/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -q -m "not slow and not ci" "${tests[@]}"
