"""mtrl demonstrate: write episodes of an environment's demonstrator, for supervised fine-tuning.

    mtrl demonstrate experiment=search --out demonstrations.jsonl
    mtrl sft --data demonstrations.jsonl --out warm --model Qwen/Qwen3-0.6B

Every line is `{"messages": […]}`, with `tools` if the environment offers any: the format that `mtrl.sft` reads. The
episodes are on training rows, repeated if there are too few; held-out rows are never used. The demonstrator is weak on
purpose: it fails as often as the warm start of a run requires.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.command.program import run_program
from mtrl.config.outputs import check_local
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstrator and write its episodes. Return the exit status.

    Raises:
        UserError: the task has no demonstrator or no training rows, a demonstration fails, the file exists already, or
            `--count` is less than 1.
    """
    args = parse(argv)
    config: Config = OmegaConf.to_object(compose(args.overrides, args.config_dir))  # type: ignore[assignment]
    check_local(f"--out={args.out}", args.out)
    if args.out.exists():
        raise UserError(f"--out={args.out} exists; choose another file, or delete it first")
    if args.count is not None and args.count < 1:
        raise UserError(f"--count={args.count} must be 1 or more")
    task = load_task(config)
    if task.family.demonstrate is None:
        raise UserError(f"the task {task.family.name} has no demonstrator; give its family a `demonstrate`")
    if not task.splits.train:
        raise UserError("there are no training rows to demonstrate; check data.path and data.train_split")
    from mtrl.rollout.demonstrations import demonstrations

    count = args.count or config.model.warm_start.demonstrations
    rng, timeout = random.Random(config.seed), config.environment.step_timeout
    out = args.out.absolute()  # an environment may change the working directory
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for chat in demonstrations(task.family, task.make_for_demonstrations, task.splits.train, rng, count, timeout):
            line = {"messages": chat.messages} | ({"tools": chat.tools} if chat.tools else {})
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    partial.rename(out)
    print(f"{count} episodes on {min(count, len(task.splits.train))} training rows, written to {args.out}")
    print(f"fine-tune on them with: mtrl sft --data {args.out} --out warm --model MODEL")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl demonstrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mtrl train")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--count", type=int, help="episodes (default: model.warm_start.demonstrations)")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
