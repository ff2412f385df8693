"""Checks of a job's settings before anything is built or requested: one sentence per fault, without credentials or
network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mtrl.errors import UserError
from mtrl.sagemaker import service, source
from mtrl.sagemaker.schema import HOUR, JobConfig, ManagedConfig
from mtrl.utils.files import in_home

ROLE = "arn:aws:iam::123456789012:role/NAME"
BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
NAME = re.compile(r"[a-zA-Z0-9]([_-]*[a-zA-Z0-9])*")
"""Pattern of `sagemaker.name`; the SDK writes a hyphen for each underscore."""
URI = re.compile(rf"s3://{BUCKET.pattern}(/.*)?")
MLFLOW = re.compile(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:mlflow-(tracking-server|app)/.+")
BASE = "base"
"""Value of `managed.evaluate` for the model itself."""
LONGEST_EVALUATION = 72 * HOUR
OWN_KEYS = {
    "sweep": "a sweep starts many runs, and a job is one run; start a job for each of them",
    "run_dir": "the folder of the run is the job's own; leave it out",
    "resume": "a job goes on by itself; to continue an earlier one write sagemaker.checkpoints=s3://…/checkpoints",
}


def check_job(job: JobConfig, cfg: DictConfig) -> None:
    """Check the settings of a job together with `cfg`, the configuration of the run.

    Raises:
        UserError: a setting is invalid; the message names the key, the value and the fix.
    """
    check_role("sagemaker.role", job.role)
    check_bucket("sagemaker.bucket", job.bucket)
    check_prefix("sagemaker.prefix", job.prefix)
    service.check_choice("sagemaker.instance_type", job.instance_type, "TrainingInstanceType")
    for key in ("instance_count", "volume_gb", "max_run", "processes"):
        if (value := getattr(job, key)) is not None and value < 1:
            raise UserError(f"sagemaker.{key}={value} must be at least 1")
    if job.name is not None and not NAME.fullmatch(job.name):
        raise UserError(
            f"sagemaker.name={job.name} is no name of a job; write letters, digits and hyphens, with a letter or a "
            f"digit at both ends, such as sagemaker.name={job_name(job.name) or 'my-run'}"
        )
    _checkpoints(job)
    _environment(job)
    if job.spot:
        _spot(job, cfg)
    elif job.max_wait is not None:
        raise UserError(f"sagemaker.max_wait={job.max_wait} is for spot instances; add sagemaker.spot=true")
    _network(job)
    _nodes(job)
    _engine(job, cfg)
    if job.mlflow and not MLFLOW.fullmatch(job.mlflow):
        server = "arn:aws:sagemaker:us-west-2:123456789012:mlflow-tracking-server/NAME"
        raise UserError(f"sagemaker.mlflow={job.mlflow} is not the ARN of an MLflow server; it looks like {server}")


def job_name(text: str) -> str:
    """Return the text with a hyphen for all that SageMaker does not allow in the name of a job."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", text).strip("-")


def check_managed(managed: ManagedConfig) -> None:
    """Check the settings of a job of the managed service.

    Raises:
        UserError: a setting is invalid; the message names the key, the value and the fix.
    """
    check_role("managed.role", managed.role)
    check_bucket("managed.bucket", managed.bucket)
    check_prefix("managed.prefix", managed.prefix)
    for key, example in (
        ("model", "openai-reasoning-gpt-oss-20b"),
        ("agent", "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/NAME"),
        ("mlflow", "arn:aws:sagemaker:us-west-2:123456789012:mlflow-app/NAME"),
    ):
        if not getattr(managed, key):
            raise UserError(f"managed.{key} is missing; write for example managed.{key}={example}")
    for key in ("dataset", "validation"):
        check_uri(f"managed.{key}", getattr(managed, key))
    _check_pair("managed", managed)
    _evaluation(managed)


def check_role(key: str, role: str | None) -> None:
    """Check the role of a job.

    Raises:
        UserError: the role is missing, or is not the ARN of a role.
    """
    if not role:
        raise UserError(f"{key} is missing: the role that the job runs as; write {key}={ROLE}")
    service.check_value(key, role, "RoleArn", ROLE)


def check_bucket(key: str, bucket: str | None) -> None:
    """Check the name of a bucket.

    Raises:
        UserError: the name is missing, or is not valid in S3.
    """
    if not bucket:
        raise UserError(f"{key} is missing: where code and results go; write {key}=NAME, without s3://")
    if re.match(r"s3:?/", bucket):
        raise UserError(f"{key}={bucket} must be the name alone; write {key}={bucket.split('/')[-1] or 'NAME'}")
    if bucket != bucket.lower():
        raise UserError(f"{key}={bucket}: names of buckets are lower case; write {key}={bucket.lower()}")
    if not BUCKET.fullmatch(bucket) or ".." in bucket:
        raise UserError(f"{key}={bucket} is no name of a bucket: 3 to 63 of a-z, 0-9, dots and hyphens")


def check_prefix(key: str, prefix: str) -> None:
    """Check a path below the bucket.

    Raises:
        UserError: the prefix would lead to S3 addresses with empty parts, or is an address itself.
    """
    if not re.fullmatch(r"[\w.=-]+(/[\w.=-]+)*", prefix):
        raise UserError(f"{key}={prefix} must be a path below the bucket without a slash at its ends, such as mtrl/rl")


def check_uri(key: str, uri: str | None) -> None:
    """Check an address in S3; None is allowed.

    Raises:
        UserError: `uri` is not an address in S3.
    """
    if uri is not None and not URI.fullmatch(uri):
        raise UserError(f"{key}={uri} is not an address in S3; write {key}=s3://BUCKET/PATH")


def check_own_keys(words: list[str]) -> None:
    """Check that no override sets a key that the job sets itself.

    Raises:
        UserError: an override sets one of `OWN_KEYS`.
    """
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key in OWN_KEYS:
            raise UserError(f"{word}: {OWN_KEYS[key]}")


def check_local_path(key: str, path: str, job: JobConfig) -> None:
    """Check that the container will have the file or folder that `key` names on this machine.

    Raises:
        UserError: the archive of the code does not hold it.
    """
    if not in_home(path).exists() or source.holds(path, job.include):
        return
    if job.image and Path(path).is_absolute():
        return  # the image may hold it, too
    raise UserError(
        f"{key}={path} is on this machine, and the job does not have it; copy it to S3 and write "
        f"{key}=s3://BUCKET/PATH, or send it with the code: 'sagemaker.include=[{path}]' {key}={in_home(path).name}"
    )


def _checkpoints(job: JobConfig) -> None:
    if job.checkpoints not in (None, "auto"):
        check_uri("sagemaker.checkpoints", job.checkpoints)
        if job.file_system is not None:
            raise UserError(
                f"sagemaker.checkpoints={job.checkpoints} does not go with sagemaker.file_system={job.file_system}, "
                "where the run lies then; leave one of them out"
            )


def _spot(job: JobConfig, cfg: DictConfig) -> None:
    if job.max_wait is None:
        raise UserError(
            f"sagemaker.spot=true needs sagemaker.max_wait: seconds for waiting and training together, at least "
            f"sagemaker.max_run={job.max_run}; write sagemaker.max_wait={2 * job.max_run}"
        )
    if job.max_wait < job.max_run:
        raise UserError(
            f"sagemaker.max_wait={job.max_wait} must be at least sagemaker.max_run={job.max_run}; "
            f"write sagemaker.max_wait={2 * job.max_run}"
        )
    if job.checkpoints is None and job.file_system is None:
        raise UserError(
            "sagemaker.spot=true with sagemaker.checkpoints=null loses all when the instance is taken away; "
            "write sagemaker.checkpoints=auto"
        )
    if not cfg.trainer.checkpoint.every_steps:
        raise UserError(
            "sagemaker.spot=true with trainer.checkpoint.every_steps=0 has nothing to go on from; "
            "write trainer.checkpoint.every_steps=10"
        )
    if job.keep_alive:
        raise UserError(f"sagemaker.keep_alive={job.keep_alive} does not go with sagemaker.spot=true; set it to 0")


def _evaluation(managed: ManagedConfig) -> None:
    """Check the settings that only an evaluation reads, or only training."""
    if managed.evaluate is None:
        for key in ("compare_base", "max_run"):
            if (value := getattr(managed, key)) != getattr(ManagedConfig, key):
                raise UserError(
                    f"managed.{key}={str(value).lower()} is read by an evaluation only; leave it out, or evaluate by "
                    "managed.evaluate=base"
                )
        return
    for key in ("dataset", "package_group", "checkpoint_group"):
        if (value := getattr(managed, key)) is not None:
            raise UserError(f"managed.{key}={value} is read in training only; leave it out of an evaluation")
    if managed.evaluate != BASE:
        package = "arn:aws:sagemaker:us-west-2:123456789012:model-package/NAME/1"
        service.check_value("managed.evaluate", managed.evaluate, "ModelPackageArn", f"{BASE}, or {package}")
    if not 1 <= managed.max_run <= LONGEST_EVALUATION:
        raise UserError(f"managed.max_run={managed.max_run} must be from 1 to {LONGEST_EVALUATION} seconds")


def _check_pair(section: str, settings: JobConfig | ManagedConfig) -> None:
    """Check that subnets and security groups are both given, or neither."""
    if bool(settings.subnets) != bool(settings.security_groups):
        there, missing = ("subnets", "security_groups") if settings.subnets else ("security_groups", "subnets")
        raise UserError(f"{section}.{there} needs {section}.{missing} beside it; write {section}.{missing}=[ID]")


def _environment(job: JobConfig) -> None:
    """Check that `sagemaker.environment` has no variable that another key sets."""
    set_by = {
        "SM_CHECKPOINT_DIR": "checkpoints" if job.checkpoints and not job.file_system else None,
        "MLFLOW_TRACKING_URI": "mlflow" if job.mlflow else None,
    }
    for name, key in set_by.items():
        if key and name in job.environment:
            raise UserError(
                f"sagemaker.environment.{name}={job.environment[name]} would be replaced, because sagemaker.{key} sets "
                "this variable; leave one of the two out"
            )


def _network(job: JobConfig) -> None:
    _check_pair("sagemaker", job)
    if job.file_system is None:
        return
    service.check_value("sagemaker.file_system", job.file_system, "FileSystemId", "fs-0123456789abcdef0")
    service.check_choice("sagemaker.file_system_type", job.file_system_type, "FileSystemType")
    if not job.subnets:
        raise UserError(
            f"sagemaker.file_system={job.file_system} is reached through your VPC; "
            "add sagemaker.subnets=[ID] and sagemaker.security_groups=[ID]"
        )


def _nodes(job: JobConfig) -> None:
    """Check the number of instances: all ranks write their shards into the same checkpoint (docs/scale.md), but
    instances share no disk."""
    if job.instance_count > 1 and job.file_system is None:
        raise UserError(
            f"sagemaker.instance_count={job.instance_count}: the ranks write their shards into one folder, and "
            "instances share none; add sagemaker.file_system=fs-ID with its subnets and security_groups, or train on "
            "one instance with more GPUs"
        )


def _engine(job: JobConfig, cfg: DictConfig) -> None:
    """Check the engine: engines run in an environment of their own (docs/engines.md), which AWS's container does not
    have."""
    backend: Any = cfg.generator.backend
    if backend in ("vllm", "sglang") and job.image is None:
        raise UserError(
            f"generator={backend}: AWS's container has no {backend}; build an image that holds it, and name it in "
            "sagemaker.image"
        )
