"""The command of scripts/launch_sagemaker.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mtrl.command.program import one_sentence
from mtrl.sagemaker.job import dry_run, plan, submit

HELP = """python scripts/launch_sagemaker.py [OVERRIDES OF mtrl.main] sagemaker.KEY=VALUE ...

    python scripts/launch_sagemaker.py experiment=text_to_sql sagemaker.role=ARN sagemaker.bucket=NAME \\
        sagemaker.instance_type=ml.p5.48xlarge sagemaker.dry_run=true

Starts a training job on SageMaker that runs python -m mtrl.main with these overrides. sagemaker=spot and sagemaker=cpu
take conf/sagemaker/NAME.yaml; mtrl/sagemaker/schema.py has every key, docs/sagemaker.md the guide."""


def main(argv: Sequence[str] | None = None) -> None:
    """Check the job, then print the request or start the job.

    Raises:
        SystemExit: with status 2 after one sentence that names the error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return
    with one_sentence():
        job = plan(words)
        if job.settings.dry_run:
            print(json.dumps({"CreateTrainingJob": dry_run(job), "overrides": list(job.overrides)}, indent=2))
            print("dry run: the request fits SageMaker's model; nothing was sent", file=sys.stderr)
            return
        name = submit(job)
        print(f"started {name}; what it saves appears below s3://{job.settings.bucket}/{job.settings.prefix}")
