"""A connection to AWS that leads nowhere: the SDK's real classes work on it, and nothing leaves the process.

botocore asks `before-call` handlers for an answer before it opens a connection. Here they always have one, so that
every client of the session, whoever makes it, is answered from a table; what is not in the table is denied. Without
this a dry run would not be one: constructors of the SDK make buckets, model package groups and MLflow apps.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""From the request to the answer."""

ACCOUNT = "123456789012"
"""AWS's account of examples."""


@dataclass
class Wire:
    """The answers, and what was asked. Operations are named as botocore names them, such as `CreateTrainingJob`."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """The bodies of all requests of that operation, in their order."""
        return [body for name, body in self.calls if name == operation]

    def answer(self, model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        """botocore's handler of `before-call`: response and parsed body."""
        body = _json(params.get("body"))
        self.calls.append((model.name, body))
        known = {**STORAGE, **self.answers}.get(model.name)
        if known is None:
            denied = {"Code": "AccessDenied", "Message": f"a dry run asks nobody for {model.name}"}
            return SimpleNamespace(status_code=403), {"Error": denied, "ResponseMetadata": {}}
        return SimpleNamespace(status_code=200), {**known({**params, "body": body}), "ResponseMetadata": {}}


STORAGE: dict[str, Answer] = {
    "HeadBucket": lambda request: {},
    "ListBuckets": lambda request: {"Buckets": []},
    "ListObjectsV2": lambda request: {"KeyCount": 1, "Contents": [{"Key": "there"}]},
    "PutObject": lambda request: {"ETag": '"0"'},
    "GetCallerIdentity": lambda request: {
        "Account": ACCOUNT,
        "Arn": f"arn:aws:iam::{ACCOUNT}:user/dry-run",
        "UserId": "dry-run",
    },
}
"""What every job asks of S3 and STS."""


@contextmanager
def offline(wire: Wire, region: str) -> Iterator[Any]:
    """A boto3 session; meanwhile each client of this process, whoever makes it, is answered by `wire`.

    Parts of the SDK make sessions of their own, so the handler goes where botocore takes those of new sessions from.
    """
    import boto3
    from botocore.handlers import BUILTIN_HANDLERS
    from sagemaker.core.utils.utils import SageMakerClient

    entry = ("before-call", wire.answer)
    BUILTIN_HANDLERS.append(entry)
    SageMakerClient.reset()  # the SDK keeps clients: none of before is used here, and none of here afterwards
    try:
        session = boto3.Session(aws_access_key_id="dry-run", aws_secret_access_key="dry-run", region_name=region)
        with as_default(session):
            yield session
    finally:
        BUILTIN_HANDLERS.remove(entry)
        SageMakerClient.reset()


@contextmanager
def as_default(session: Any) -> Iterator[None]:
    """Meanwhile boto3's own default session is this one: parts of the SDK ask for `boto3.client` by themselves."""
    import boto3

    before, boto3.DEFAULT_SESSION = boto3.DEFAULT_SESSION, session
    try:
        yield
    finally:
        boto3.DEFAULT_SESSION = before


def stream(value: Any) -> Any:
    """`value` as the body of an object in S3."""
    return io.BytesIO(json.dumps(value).encode())


def _json(body: Any) -> dict[str, Any]:
    """The body of a request in the JSON protocol; of others (S3) nothing is kept."""
    try:
        parsed = json.loads(body)
    except (TypeError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
