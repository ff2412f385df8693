"""A stub connection to AWS: the SDK's real classes use it, and no request leaves the process.

botocore calls `before-call` handlers before it opens a connection, and uses their answer if they return one. The
handler here always returns an answer, so that every client of the process is answered from a table; operations that are
not in the table are denied. Without the stub, a dry run would have side effects, because constructors of the SDK create
buckets, model package groups and MLflow apps.
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
"""Function from a request to its answer."""

ACCOUNT = "123456789012"
"""Account id that AWS uses in examples."""


@dataclass
class Wire:
    """The table of answers, and the recorded requests. Operations have botocore's names, such as
    `CreateTrainingJob`."""

    answers: Mapping[str, Answer] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """Return the bodies of all requests of the operation, in their order."""
        return [body for name, body in self.calls if name == operation]

    def answer(self, model: Any, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        """Handle botocore's `before-call` event: return the response and the parsed body."""
        body = _json(params.get("body"))
        self.calls.append((model.name, body))
        known = {**STORAGE, **self.answers}.get(model.name)
        if known is None:
            denied = {"Code": "AccessDenied", "Message": f"a dry run sends no request for {model.name}"}
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
"""Answers to the requests that every job sends to S3 and STS."""


@contextmanager
def offline(wire: Wire, region: str) -> Iterator[Any]:
    """Yield a boto3 session. During the context, `wire` answers every client of this process.

    Parts of the SDK create sessions of their own, so the handler is added to botocore's list of handlers for new
    sessions.
    """
    import boto3
    from botocore.handlers import BUILTIN_HANDLERS
    from sagemaker.core.utils.utils import SageMakerClient

    entry = ("before-call", wire.answer)
    BUILTIN_HANDLERS.append(entry)
    SageMakerClient.reset()  # the SDK caches clients; they must not cross the bounds of this context
    try:
        session = boto3.Session(aws_access_key_id="dry-run", aws_secret_access_key="dry-run", region_name=region)
        with as_default(session):
            yield session
    finally:
        BUILTIN_HANDLERS.remove(entry)
        SageMakerClient.reset()


@contextmanager
def as_default(session: Any) -> Iterator[None]:
    """Make `session` boto3's default session during the context, because parts of the SDK call `boto3.client`
    directly."""
    import boto3

    before, boto3.DEFAULT_SESSION = boto3.DEFAULT_SESSION, session
    try:
        yield
    finally:
        boto3.DEFAULT_SESSION = before


def stream(value: Any) -> Any:
    """Return `value` as the body of an object in S3."""
    return io.BytesIO(json.dumps(value).encode())


def _json(body: Any) -> dict[str, Any]:
    """Parse the body of a request in the JSON protocol; bodies of other protocols (S3) give an empty dict."""
    try:
        parsed = json.loads(body)
    except (TypeError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
