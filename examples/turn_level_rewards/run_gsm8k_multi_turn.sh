#!/usr/bin/env bash
# Word problems over several turns, each turn paid.
#
#   bash examples/turn_level_rewards/run_gsm8k_multi_turn.sh                      a tiny policy, two CPU cores
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct ENGINE=sglang \
#       bash examples/turn_level_rewards/run_gsm8k_multi_turn.sh                  a real model, a GPU
#
# DATA is the folder that gsm8k_multi_turn_dataset.py wrote. Words behind the script change any key of the run.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
data=${DATA:-data/gsm8k_multi_turn}
if [ ! -e "$data/train.jsonl" ]; then
    echo "$data/train.jsonl is not there; write it with: python $here/gsm8k_multi_turn_dataset.py --output_dir $data" >&2
    exit 2
fi
if [ -n "${MODEL:-}" ]; then
    set -- experiment=gsm8k_multi_turn model=hf model.path="$MODEL" trainer.optimizer.lr=1e-6 \
        generator.backend="${ENGINE:-local}" generator.sampling_params.max_generate_length=512 "$@"
else
    set -- experiment=gsm8k "$@"
fi
exec python -m mtrl.main data.path="$data" name=gsm8k_multi_turn "$@"
