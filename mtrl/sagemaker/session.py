"""What a command has to do with AWS: region, session, bucket, and one sentence for each of its errors."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from mtrl.errors import UserError, missing_extra

SDK_DEFAULTS: dict[str, Any] = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""The SDK reports nothing home. Its own files of defaults still fill what a command leaves open; a dry run shows it."""


def default_region() -> str:
    """
    Raises:
        UserError: nothing says which.
    """
    try:
        import boto3
    except ImportError:
        raise missing_extra("boto3", "sagemaker") from None
    region = os.environ.get("AWS_REGION") or boto3.Session().region_name
    if not region:
        raise UserError(
            "there is no region: AWS is not configured here; set AWS_DEFAULT_REGION, or write region=us-west-2 behind "
            "sagemaker. or managed."
        )
    return str(region)


def sdk_session(boto_session: Any, bucket: str, prefix: str) -> Any:
    """The SDK's session, which keeps whatever it uploads below s3://BUCKET/PREFIX."""
    from sagemaker.core.helper.session_helper import Session

    return Session(
        boto_session=boto_session,
        default_bucket=bucket,
        default_bucket_prefix=prefix,
        sagemaker_config=SDK_DEFAULTS,
    )


def check_bucket_exists(key: str, bucket: str | None, boto_session: Any) -> None:
    """The SDK would make a bucket that is not there; here it is a typing error.

    Raises:
        UserError: it is not there, or not ours.
    """
    from botocore.exceptions import ClientError

    try:
        boto_session.client("s3").head_bucket(Bucket=bucket)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        why = "does not exist" if status == 404 else f"cannot be used with these credentials (HTTP {status})"
        raise UserError(
            f"{key}={bucket} {why}; write a bucket of yours, or make it: aws s3 mb s3://{bucket}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """A dry run asks nobody, so what the SDK says and prints meanwhile would only mislead."""
    logger = logging.getLogger("sagemaker")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def explaining() -> Iterator[None]:
    """What AWS or the SDK refuses, as one sentence.

    Raises:
        UserError: their words.
    """
    try:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
        from sagemaker.core.helper.iam_role_resolver import RoleValidationError
    except ImportError:
        raise missing_extra("sagemaker", "sagemaker") from None
    try:
        yield
    except UserError:
        raise
    except NoCredentialsError as error:
        raise UserError(
            "there are no AWS credentials here; aws configure sets them, dry_run=true needs none"
        ) from error
    except (BotoCoreError, ClientError, RoleValidationError, ValueError, RuntimeError) as error:
        raise UserError(f"SageMaker: {' '.join(str(error).split())}") from error
