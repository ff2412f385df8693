"""Write the rows of GSM8K over several turns, as JSON Lines.

    python examples/turn_level_rewards/gsm8k_multi_turn_dataset.py                       generated word problems
    python examples/turn_level_rewards/gsm8k_multi_turn_dataset.py --source openai/gsm8k    GSM8K from the Hub

`--source` may also be a folder or a file. Each row has a prompt (messages) and a ground truth, and keeps its other
columns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from envs.gsm8k.data import load
from mtrl.command.program import run_program
from mtrl.config.outputs import check_local
from mtrl.config.schema import DataConfig

SYNTHETIC = "synthetic"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SYNTHETIC, help="synthetic, a Hub name, a folder or a file")
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=Path("data/gsm8k_multi_turn"))
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic problems")
    args = parser.parse_args(argv)
    check_local(f"--output_dir={args.output_dir}", args.output_dir)
    is_synthetic = args.source == SYNTHETIC
    # The tiny policy cannot do arithmetic, so generated problems come with a calculator.
    splits = load(DataConfig(path=None if is_synthetic else args.source), args.seed, calculator=is_synthetic)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", splits.train), ("test", splits.test)):
        path = args.output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{len(rows)} rows in {path}")
    return 0


if __name__ == "__main__":
    run_program(main)
