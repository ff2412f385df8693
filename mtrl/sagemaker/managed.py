"""The managed multi-turn RL service, and the command that starts its jobs (scripts/launch_managed_rl.py).

The SDK's MultiTurnRLTrainer and MultiTurnRLEvaluator are built from the same configuration as a run.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.command.program import one_sentence
from mtrl.sagemaker import checks, hyperparameters, service, stand_in
from mtrl.sagemaker.dataset import check_size, write_parquet
from mtrl.sagemaker.managed_job import ManagedJob
from mtrl.sagemaker.schema import ManagedConfig
from mtrl.sagemaker.session import check_bucket_exists, default_region, explaining, quiet, sdk_session
from mtrl.sagemaker.settings import read, split
from mtrl.sagemaker.wire import Wire, as_default, offline
from mtrl.training import warn

HELP = """python scripts/launch_managed_rl.py [OVERRIDES OF mtrl.main] managed.KEY=VALUE ...

    python scripts/launch_managed_rl.py experiment=text_to_sql algorithm=rloo managed.agent=ARN \\
        managed.model=openai-reasoning-gpt-oss-20b managed.role=ARN managed.bucket=NAME managed.mlflow=ARN \\
        managed.dry_run=true

Hands the rows of an experiment and an agent to SageMaker's managed multi-turn RL; managed.evaluate=base evaluates
instead. mtrl/sagemaker/schema.py has every key, docs/sagemaker.md the guide."""


def plan(words: Sequence[str]) -> ManagedJob:
    """Read and check a command. No network access is needed.

    Raises:
        UserError: a setting is invalid, or the service does not offer the algorithm; only the first fault is reported.
    """
    ours, others = split(words, "managed")
    settings = read(ours, "managed", ManagedConfig)
    checks.check_own_keys(others)
    cfg = compose(others)
    checks.check_managed(settings)
    if settings.evaluate:
        return ManagedJob(settings, cfg, hyperparameters.translate_evaluation(cfg), ())
    return ManagedJob(settings, cfg, hyperparameters.translate(cfg), tuple(hyperparameters.left_out(cfg)))


def dry_run(job: ManagedJob) -> tuple[dict[str, Any], list[str]]:
    """Return the requests that would start the job, made by the SDK's classes, and warnings.

    Only the content of the model hub is unknown here; the table of `hyperparameters` replaces it.

    Raises:
        UserError: the SDK or the service's model rejects a request.
    """
    wire = Wire(stand_in.answers(job))
    with quiet(), explaining(), offline(wire, job.settings.region or default_region()) as session:
        _, warnings = _start(job, session)
    sent = {name: bodies[-1] for name in _STARTS if (bodies := wire.asked(name))}
    for name, body in sent.items():
        service.check_request(name, body)
    return {name: _readable(body) for name, body in sent.items()}, warnings


_STARTS = ("CreateJob", "CreatePipeline", "StartPipelineExecution")


def submit(job: ManagedJob, session: Any = None) -> tuple[str, list[str]]:
    """Upload the data, start the job, and return its ARN and warnings. `session` is a boto3 session.

    Raises:
        UserError: a request is invalid, the bucket does not exist, or AWS rejects a request.
    """
    dry_run(job)
    import boto3

    with explaining():
        session = session or boto3.Session(region_name=job.settings.region or default_region())
        check_bucket_exists("managed.bucket", job.settings.bucket, session)
        with as_default(session):
            started, warnings = _start(job, session)
            if job.settings.wait:
                started.wait()
    return str(getattr(started, "job_arn", None) or started.arn), warnings


def _start(job: ManagedJob, boto_session: Any) -> tuple[Any, list[str]]:
    session = sdk_session(boto_session, str(job.settings.bucket), job.settings.prefix)
    with tempfile.TemporaryDirectory() as folder:
        data, warnings = _data(job, session, Path(folder))
        with contextlib.chdir(folder):  # the SDK writes a copy of its pipeline into the working directory
            start = _evaluate if job.evaluates else _train
            started, more = start(job, session, data)
        return started, [*warnings, *more]


def _data(job: ManagedJob, session: Any, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the addresses of the prompts in S3, and warnings. Prompts of the experiment are uploaded first."""
    settings, found = job.settings, {}
    wanted = {"validation": settings.validation} if job.evaluates else {}
    wanted = wanted or {"train": settings.dataset, "validation": settings.validation}
    if all(wanted.values()):
        return {name: str(uri) for name, uri in wanted.items()}, []
    from mtrl.environments.factory import load_task

    config: Any = OmegaConf.to_object(job.cfg)
    splits = load_task(config).splits
    warnings: list[str] = []
    for name, uri in wanted.items():
        rows = splits.train if name == "train" else splits.test
        if uri is None:
            if name == "train":
                warnings += filter(None, [check_size(len(rows), job.cfg.trainer.prompts_per_step)])
            write_parquet(rows, folder / f"{name}.parquet")
            key = f"{job.cfg.name}/data"
            uri = session.upload_data(
                str(folder / f"{name}.parquet"), bucket=settings.bucket, key_prefix=_key(job, key)
            )
        found[name] = str(uri)
    return found, warnings


def _key(job: ManagedJob, key: str) -> str:
    return f"{job.settings.prefix}/{key}"


def _train(job: ManagedJob, session: Any, data: dict[str, str]) -> tuple[Any, list[str]]:
    from sagemaker.core.shapes import VpcConfig
    from sagemaker.train.multi_turn_rl_trainer import MultiTurnRLTrainer

    settings = job.settings
    network = settings.subnets and VpcConfig(subnets=settings.subnets, security_group_ids=settings.security_groups)
    trainer = MultiTurnRLTrainer(
        model=settings.model,
        agent_env=settings.agent,
        training_dataset=data["train"],
        validation_dataset=data["validation"],
        mlflow_app_arn=settings.mlflow,
        mlflow_experiment_name=job.cfg.tracker.project,
        mlflow_run_name=job.cfg.name,
        s3_output_path=f"{job.folder}/output",
        output_model_package_group=settings.package_group,
        intermediate_checkpoint_model_package_group=settings.checkpoint_group,
        bedrock_agentcore_qualifier=settings.agent_qualifier,
        networking=network or None,
        kms_key_arn=settings.kms_key,
        accept_eula=settings.accept_eula,
        sagemaker_session=session,
        role=settings.role,
        base_job_name=checks.job_name(f"mtrl-{job.cfg.name}"),
        tags=[{"key": key, "value": value} for key, value in settings.tags.items()],
    )
    warnings = list(_set(trainer.hyperparameters, job.hyperparameters))
    return trainer.train(wait=False), warnings


def _set(options: Any, values: dict[str, Any]) -> Iterator[str]:
    """Set the SDK's options, and yield a line for each value that the model's recipe in the hub does not have."""
    for name, value in values.items():
        if hasattr(options, name):
            setattr(options, name, value)
        else:
            yield f"the recipe of this model has no {name}, so {name}={value} is left out"


def _evaluate(job: ManagedJob, session: Any, data: dict[str, str]) -> tuple[Any, list[str]]:
    from sagemaker.core.shapes import VpcConfig
    from sagemaker.train.evaluate import MultiTurnRLEvaluator

    settings = job.settings
    network = settings.subnets and VpcConfig(subnets=settings.subnets, security_group_ids=settings.security_groups)
    evaluator = MultiTurnRLEvaluator(
        sagemaker_session=session,
        region=session.boto_region_name,
        role=settings.role,
        model=settings.model if settings.evaluate == checks.BASE else settings.evaluate,
        dataset=data["validation"],
        agent_config=settings.agent,
        agent_qualifier=settings.agent_qualifier,
        s3_output_path=f"{job.folder}/evaluation",
        mlflow_resource_arn=settings.mlflow,
        mlflow_experiment_name=job.cfg.tracker.project,
        evaluate_base_model=settings.compare_base,
        stopping_condition=settings.max_run,
        networking=network or None,
        kms_key_id=settings.kms_key,
        accept_eula=settings.accept_eula,
        tags=[{"key": key, "value": value} for key, value in settings.tags.items()] or None,
    )
    warnings = list(_set(evaluator.hyperparameters, job.hyperparameters))
    return evaluator.evaluate(), warnings


def _readable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with its embedded documents parsed from JSON text."""
    texts = {key: body[key] for key in ("JobConfigDocument", "PipelineDefinition") if key in body}
    return {**body, **{key: json.loads(text) for key, text in texts.items()}}


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
        warn(job.warnings)
        if job.settings.dry_run:
            calls, warnings = dry_run(job)
            print(json.dumps(calls, indent=2))
            end = "dry run: nothing was sent; the model hub's own list of hyperparameters was not read"
            print(end, file=sys.stderr)
        else:
            arn, warnings = submit(job)
            print(f"started {arn}")
        warn(warnings)
