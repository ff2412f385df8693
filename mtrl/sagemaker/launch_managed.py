"""The command of scripts/launch_managed_rl.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mtrl.command.program import one_sentence
from mtrl.sagemaker.managed import dry_run, plan, submit

HELP = """python scripts/launch_managed_rl.py [OVERRIDES OF mtrl.main] managed.KEY=VALUE ...

    python scripts/launch_managed_rl.py experiment=text_to_sql algorithm=rloo managed.agent=ARN \\
        managed.model=openai-reasoning-gpt-oss-20b managed.role=ARN managed.bucket=NAME managed.mlflow=ARN \\
        managed.dry_run=true

Hands the rows of an experiment and an agent to SageMaker's managed multi-turn RL; managed.evaluate=base evaluates
instead. mtrl/sagemaker/schema.py has every key, docs/sagemaker.md the guide."""


def main(argv: Sequence[str] | None = None) -> None:
    """Check the job, then print the requests or start the job.

    Raises:
        SystemExit: with status 2 after one sentence that names the error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return
    with one_sentence():
        job = plan(words)
        _warn(job.warnings)
        if job.settings.dry_run:
            calls, warnings = dry_run(job)
            print(json.dumps(calls, indent=2))
            end = "dry run: nothing was sent; the model hub's own list of hyperparameters was not asked"
            print(end, file=sys.stderr)
        else:
            arn, warnings = submit(job)
            print(f"started {arn}")
        _warn(warnings)


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
