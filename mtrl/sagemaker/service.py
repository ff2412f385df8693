"""Checks of requests against SageMaker's own description of its API, which botocore ships. No network access is
needed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from mtrl.config import keys
from mtrl.errors import UserError, missing_extra


@functools.cache
def model() -> Any:
    """Return botocore's service model of SageMaker.

    Raises:
        UserError: botocore is not installed.
    """
    try:
        from botocore.session import get_session
    except ImportError:
        raise missing_extra("botocore", "sagemaker") from None
    return get_session().get_service_model("sagemaker")


def check_value(key: str, value: Any, shape: str, example: str) -> None:
    """Check the value of the setting `key` against the service's `shape`.

    Raises:
        UserError: the service does not accept `value` for `shape`.
    """
    for fault in _faults(value, model().shape_for(shape), key):
        raise UserError(f"{fault}; write for example {key}={example}")


def check_choice(key: str, value: str, shape: str) -> None:
    """Check that `value` is one of the service's values for `shape`.

    Raises:
        UserError: the service does not know `value`; the message names the nearest known value.
    """
    known = model().shape_for(shape).enum
    if value in known:
        return
    near = keys.nearest(value, known)
    hint = f"did you mean {near}?" if near else f"there is {', '.join(known[:8])} and so on"
    raise UserError(f"{key}={value} is not known to SageMaker; {hint}")


def check_request(operation: str, request: dict[str, Any]) -> None:
    """Check a request against the service's model. botocore's own validator checks types, required members, unknown
    members and minimum lengths. This function also checks enumerations, patterns and maximum lengths, which botocore
    leaves to the service.

    Raises:
        UserError: the service would reject the request, according to its model; the message lists all faults.
    """
    from botocore.validate import ParamValidator

    shape = model().operation_model(operation).input_shape
    report = ParamValidator().validate(request, shape)
    faults = [report.generate_report()] if report.has_errors() else list(_faults(request, shape, operation))
    if faults:
        raise UserError(f"SageMaker would refuse this request: {'; '.join(faults)}")


def _faults(value: Any, shape: Any, path: str) -> Iterator[str]:
    if shape.type_name == "structure":
        for name, inner in value.items():
            yield from _faults(inner, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "list":
        yield from _length(value, shape, path, "entries")
        for number, inner in enumerate(value):
            yield from _faults(inner, shape.member, f"{path}[{number}]")
    elif shape.type_name == "map":
        yield from _length(value, shape, path, "entries")
        for name, inner in value.items():
            yield from _faults(name, shape.key, f"{path}.{name} (the name)")
            yield from _faults(inner, shape.value, f"{path}.{name}")
    elif shape.type_name == "string":
        yield from _text(value, shape, path)
    elif shape.type_name in ("integer", "long"):
        low, high = shape.metadata.get("min"), shape.metadata.get("max")
        if (low is not None and value < low) or (high is not None and value > high):
            yield f"{path}={value} must lie from {low} to {high if high is not None else 'any number'}"


def _text(value: str, shape: Any, path: str) -> Iterator[str]:
    if shape.enum and value not in shape.enum:
        yield f"{path}={value} is not one of {', '.join(shape.enum)}"
        return
    yield from _length(value, shape, f"{path}={value}", "characters")
    pattern = shape.metadata.get("pattern")
    if pattern and not _matches(pattern, value):
        yield f"{path}={value} does not look like {pattern}"


def _length(value: Any, shape: Any, path: str, unit: str) -> Iterator[str]:
    low, high = shape.metadata.get("min", 0), shape.metadata.get("max")
    if len(value) < low or (high is not None and len(value) > high):
        bounds = f"{low} to {high}" if high is not None else f"at least {low}"
        yield f"{path} has {len(value)} {unit}, and {bounds} are allowed"


def _matches(pattern: str, value: str) -> bool:
    r"""Whether a Java pattern matches the value. Python's `re` cannot read `\p{…}`, so its own classes replace them."""
    readable = pattern.replace(r"\p{L}", r"\w").replace(r"\p{N}", r"\d").replace(r"\p{Z}", r"\s")
    return re.fullmatch(readable, value) is not None
