"""Access to AWS: region, session, bucket, and error messages of one sentence."""

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
"""SDK configuration that disables telemetry. The SDK's own files of defaults still set the values that a command omits;
a dry run shows them."""


def default_region() -> str:
    """Return the region of the AWS configuration.

    Raises:
        UserError: no region is configured, or boto3 is not installed.
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
    """Return the SDK's session, which uploads all files below s3://BUCKET/PREFIX."""
    from sagemaker.core.helper.session_helper import Session

    return Session(
        boto_session=boto_session,
        default_bucket=bucket,
        default_bucket_prefix=prefix,
        sagemaker_config=SDK_DEFAULTS,
    )


def check_bucket_exists(key: str, bucket: str | None, boto_session: Any) -> None:
    """Check that the bucket exists. The SDK would create a missing bucket, although its name is probably a typing
    error.

    Raises:
        UserError: the bucket does not exist, or the credentials do not allow its use.
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
    """Suppress the SDK's logs and prints, which would mislead in a dry run because no request is sent."""
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
    """Convert errors of AWS and the SDK to a `UserError` of one sentence.

    Raises:
        UserError: AWS or the SDK raised an error; the message holds its text.
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
