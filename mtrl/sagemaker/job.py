"""A training job, and the command that starts it (scripts/launch_sagemaker.py).

The SDK's ModelTrainer is built from the settings; its request is intercepted before it is sent.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.command.program import one_sentence
from mtrl.errors import UserError, missing_extra
from mtrl.sagemaker import checks, service, source
from mtrl.sagemaker.schema import JobConfig
from mtrl.sagemaker.session import check_bucket_exists, default_region, explaining, quiet, sdk_session
from mtrl.sagemaker.settings import read, split
from mtrl.sagemaker.wire import ACCOUNT, Wire, as_default, offline

CHECKPOINTS = "/opt/ml/checkpoints"
"""Folder in which SageMaker restores saved checkpoints, and from which it copies new ones."""
CHANNELS = {"data.path": "data", "model.path": "model"}
"""Input channel of each setting that may be an address in S3."""
SHARED = "shared"
"""Name of the file system's channel."""
PLACEHOLDER = "channel/input"
"""Placeholder for an address in S3 while the configuration is checked."""
HELP = """python scripts/launch_sagemaker.py [OVERRIDES OF mtrl.main] sagemaker.KEY=VALUE ...

    python scripts/launch_sagemaker.py experiment=text_to_sql sagemaker.role=ARN sagemaker.bucket=NAME \\
        sagemaker.instance_type=ml.p5.48xlarge sagemaker.dry_run=true

Starts a training job on SageMaker that runs mtrl train with these overrides. sagemaker=spot and sagemaker=cpu
take conf/sagemaker/NAME.yaml; mtrl/sagemaker/schema.py has every key, docs/sagemaker.md the guide."""


@dataclass(frozen=True)
class SageMakerJob:
    """A job to start."""

    settings: JobConfig
    overrides: tuple[str, ...]
    """Overrides of mtrl.main in the container."""
    channels: dict[str, str]
    """Address (s3://…) of each input channel."""
    name: str
    """Base name of the job; the SDK appends the time."""


def plan(words: Sequence[str]) -> SageMakerJob:
    """Read and check a command: the run as `mtrl train` would, then the job. No network access is needed.

    Raises:
        UserError: a setting is invalid; only the first fault is reported.
    """
    ours, others = split(words, "sagemaker")
    settings = read(ours, "sagemaker", JobConfig)
    checks.check_own_keys(others)
    if settings.mlflow:
        others = [*_without(others, "tracker.mlflow.uri"), f"tracker.mlflow.uri='{settings.mlflow}'"]
        if not any(word.lstrip("+").startswith(("tracker=", "tracker.report_to=")) for word in others):
            others.append("tracker.report_to=[mlflow]")
    unchanged, channels = _channels(others)
    # The container has engines and data of its own, so the check must not depend on those of this machine.
    engines = [f"generator.{name}.python={sys.executable}" for name in ("vllm", "sglang")]
    data = [f"{key}={PLACEHOLDER}" for key, channel in CHANNELS.items() if channel in channels]
    cfg = compose([*unchanged, *engines, *data])
    checks.check_job(settings, cfg)
    for key, channel in CHANNELS.items():
        if channel not in channels and (path := OmegaConf.select(cfg, key)):
            checks.check_local_path(key, str(path), settings)
    return SageMakerJob(settings, tuple(unchanged), channels, settings.name or checks.job_name(f"mtrl-{cfg.name}"))


def _without(words: Sequence[str], key: str) -> list[str]:
    return [word for word in words if word.lstrip("+").partition("=")[0] != key]


def _channels(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split the overrides: those whose value is an address in S3 become input channels, and the entry sets their
    path."""
    unchanged, channels = [], {}
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if value.strip("'\"").startswith("s3:"):
            if key not in CHANNELS:
                raise UserError(f"{word}: only {' and '.join(CHANNELS)} may lie in S3; copy it there, or use the Hub")
            checks.check_uri(key, value.strip("'\""))
            channels[CHANNELS[key]] = value.strip("'\"")
        else:
            unchanged.append(word)
    return unchanged, channels


def dry_run(job: SageMakerJob) -> dict[str, Any]:
    """Return the body of the CreateTrainingJob request that `submit` would send, checked against the service's model.

    Raises:
        UserError: the service would reject the request, according to its model.
    """
    wire = Wire(answers={"CreateTrainingJob": _there, "DescribeTrainingJob": _there})
    with (
        quiet(),
        explaining(),
        offline(wire, job.settings.region or default_region()) as session,
        _trainer(job, session) as trainer,
    ):
        trainer.train(wait=False, logs=False)
    request = wire.asked("CreateTrainingJob")[0]
    service.check_request("CreateTrainingJob", request)
    return request


def _there(request: dict[str, Any]) -> dict[str, Any]:
    name = request["body"]["TrainingJobName"]
    return {"TrainingJobName": name, "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:training-job/{name}"}


def submit(job: SageMakerJob, session: Any = None) -> str:
    """Upload the code, start the job, and return its name. `session` is a boto3 session; None means the machine's
    default.

    Raises:
        UserError: the request is invalid, the bucket does not exist, or AWS rejects the request.
    """
    dry_run(job)
    import boto3

    with explaining():
        session = session or boto3.Session(region_name=job.settings.region or default_region())
        check_bucket_exists("sagemaker.bucket", job.settings.bucket, session)
        with _trainer(job, session) as trainer:
            trainer.train(wait=job.settings.wait, logs=job.settings.wait)
    return str(trainer._latest_training_job.training_job_name)


@contextmanager
def _trainer(job: SageMakerJob, boto_session: Any) -> Iterator[Any]:
    """Yield the SDK's ModelTrainer of a job. The archive of the code is deleted when the context ends."""
    try:
        from sagemaker.train import ModelTrainer
        from sagemaker.train import configs as sdk
        from sagemaker.train.distributed import Torchrun
    except ImportError:
        raise missing_extra("sagemaker", "sagemaker") from None
    settings = job.settings
    with tempfile.TemporaryDirectory() as folder, as_default(boto_session):
        archive = Path(folder) / "code.tar.gz"
        source.pack(archive, job.overrides, _requirements(settings), settings.include)
        session = sdk_session(boto_session, str(settings.bucket), settings.prefix)
        yield ModelTrainer(
            sagemaker_session=session,
            role=settings.role,
            base_job_name=job.name,
            training_image=settings.image or _container(settings, boto_session.region_name),
            source_code=sdk.SourceCode(
                source_dir=str(archive),
                entry_script=source.ENTRY,
                requirements=source.REQUIREMENTS if settings.install else None,
            ),
            distributed=Torchrun(process_count_per_node=settings.processes),
            compute=_compute(settings, sdk),
            networking=_networking(settings, sdk),
            stopping_condition=sdk.StoppingCondition(
                max_runtime_in_seconds=settings.max_run,
                **({"max_wait_time_in_seconds": settings.max_wait} if settings.spot else {}),
            ),
            output_data_config=sdk.OutputDataConfig(
                s3_output_path=f"s3://{settings.bucket}/{settings.prefix}/{job.name}",
                compression_type="NONE",  # compressing a model of gigabytes is not worth the time
                kms_key_id=settings.kms_key,
            ),
            checkpoint_config=_checkpoint_config(settings, sdk),
            input_data_config=_inputs(job, sdk),
            environment=_environment(settings),
            tags=[sdk.Tag(key=key, value=value) for key, value in settings.tags.items()] or None,
        )


def _requirements(settings: JobConfig) -> list[str]:
    if not settings.install or not settings.mlflow:
        return settings.install
    return [*settings.install, "mlflow>=3.10,<4", "sagemaker-mlflow<1"]


def _container(settings: JobConfig, region: str) -> str:
    """Return the address of AWS's deep learning container, from the SDK's own table."""
    from sagemaker.core import image_uris

    try:
        return str(
            image_uris.retrieve(
                "pytorch",
                region,
                version=settings.torch,
                py_version=settings.python,
                instance_type=settings.instance_type,
                image_scope="training",
            )
        )
    except ValueError as error:
        raise UserError(
            f"sagemaker.torch={settings.torch} with sagemaker.python={settings.python} is no container that the SDK "
            f"knows ({str(error).split('.')[0]}); write another, or name your own in sagemaker.image"
        ) from error


def _compute(settings: JobConfig, sdk: Any) -> Any:
    optional: dict[str, Any] = {}
    if settings.keep_alive:
        optional["keep_alive_period_in_seconds"] = settings.keep_alive
    if settings.kms_key:
        optional["volume_kms_key_id"] = settings.kms_key
    return sdk.Compute(
        instance_type=settings.instance_type,
        instance_count=settings.instance_count,
        volume_size_in_gb=settings.volume_gb,
        enable_managed_spot_training=settings.spot,
        **optional,
    )


def _networking(settings: JobConfig, sdk: Any) -> Any:
    if not settings.subnets:
        return None
    return sdk.Networking(subnets=settings.subnets, security_group_ids=settings.security_groups)


def _checkpoint_config(settings: JobConfig, sdk: Any) -> Any:
    """Return the checkpoint settings; None with a file system, which holds the run and outlives the instances."""
    if settings.checkpoints is None or settings.file_system:
        return None
    where = {} if settings.checkpoints == "auto" else {"s3_uri": settings.checkpoints}
    return sdk.CheckpointConfig(local_path=CHECKPOINTS, **where)


def _inputs(job: SageMakerJob, sdk: Any) -> list[Any] | None:
    inputs = [sdk.InputData(channel_name=name, data_source=uri) for name, uri in job.channels.items()]
    if job.settings.file_system:
        shared = sdk.FileSystemDataSource(
            file_system_id=job.settings.file_system,
            file_system_type=job.settings.file_system_type,
            file_system_access_mode="rw",
            directory_path=job.settings.file_system_path,
        )
        inputs.append(sdk.InputData(channel_name=SHARED, data_source=shared))
    return inputs or None


def _environment(settings: JobConfig) -> dict[str, str]:
    environment = dict(settings.environment)
    if settings.checkpoints is not None and not settings.file_system:
        environment["SM_CHECKPOINT_DIR"] = CHECKPOINTS
    if settings.mlflow:
        environment["MLFLOW_TRACKING_URI"] = settings.mlflow
    return environment


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
