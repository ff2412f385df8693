"""The available domains, and the pieces of their JSON that are single tokens for the tiny policy."""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Iterator
from typing import Any

from envs.sop import aircraft_inspection, customer_service, order_fulfilment
from envs.sop.domain import Domain
from envs.sop.output import CLOSE, OPEN
from mtrl.environments import tool_calls
from mtrl.environments.base import Resources
from mtrl.environments.replay import Recordings, ReplayTools
from mtrl.environments.tools import Tool, ToolError, toolbox
from mtrl.errors import UserError
from mtrl.types import Row

DOMAINS: dict[str, Domain] = {
    module.DOMAIN.name: module.DOMAIN for module in (aircraft_inspection, customer_service, order_fulfilment)
}
EXAMPLE = "B482"
"""Id of an example case."""


def row_tools(row: Row, resources: Resources) -> dict[str, Tool]:
    """Return the tools of an episode of `row`, by name.

    Raises:
        UserError: the row's domain is unknown.
    """
    if "tool_schemas" in row:
        return toolbox(*_recorded(row["tool_schemas"], row["fixture"]))
    if row.get("domain") not in DOMAINS:
        raise UserError(f"row {row.get('id')} has domain={row.get('domain')}; choose one of {', '.join(DOMAINS)}")
    return toolbox(DOMAINS[row["domain"]].open(row["fixture"], resources))


def example_tools(domain: Domain) -> dict[str, Tool]:
    """Return the tools of a domain, for their schemas. Tools that answer from recordings can also be called."""
    resources = Resources()
    try:
        return toolbox(domain.open(domain.fixture(domain.draw(random.Random(0), EXAMPLE)), resources))
    finally:
        resources.close()


def result_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of the result of a domain's tool."""
    return _untitled(typing.get_type_hints(tool.function)["return"].model_json_schema())


def tokens() -> tuple[str, ...]:
    """Return the pieces of JSON that are the same in every call, result and answer; each of them becomes one token."""
    return tuple(dict.fromkeys(piece for domain in DOMAINS.values() for piece in _pieces(domain)))


def _recorded(schemas: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Iterator[Tool]:
    """Yield the tools of a user's folder. A tool without recordings for this row is offered too, but has no results."""
    names = {line["tool"] for line in lines}
    known = [schema for schema in schemas if schema["function"]["name"] in names]
    if known:
        yield from ReplayTools(Recordings(lines)).tools(known)
    for schema in schemas:
        if schema not in known:
            yield Tool(schema["function"]["name"], schema, _no_result)


def _no_result(**arguments: Any) -> None:
    raise ToolError("there is no result for these arguments")


def _pieces(domain: Domain) -> Iterator[str]:
    for tool in example_tools(domain).values():
        arguments = tool.schema["function"]["parameters"]["properties"]
        yield from tool_calls.format_call(tool.name, dict.fromkeys(arguments, "\0")).split(r"\u0000")
        results = result_schema(tool)["properties"]
        holes = {name: 0 if schema.get("type") == "integer" else "\0" for name, schema in results.items()}
        yield from json.dumps(holes).replace(": 0", r": \u0000").split(r"\u0000")
    yield from f"{OPEN}{json.dumps(dict.fromkeys(domain.fields, chr(0)))}{CLOSE}".split(r"\u0000")


def _untitled(schema: Any) -> Any:
    """Return the schema without titles, which only repeat the names. No property of the domains is called `title`."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title"}
    return [_untitled(value) for value in schema] if isinstance(schema, list) else schema
