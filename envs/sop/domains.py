"""The domains there are, and what of their JSON stays one token for the tiny policy."""

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
"""The id of a case that stands for any."""


def row_tools(row: Row, resources: Resources) -> dict[str, Tool]:
    """The tools of an episode of `row`, by name.

    Raises:
        UserError: the row's domain is not known.
    """
    if "tool_schemas" in row:
        return toolbox(*_recorded(row["tool_schemas"], row["fixture"]))
    if row.get("domain") not in DOMAINS:
        raise UserError(f"row {row.get('id')} has domain={row.get('domain')}; choose one of {', '.join(DOMAINS)}")
    return toolbox(DOMAINS[row["domain"]].open(row["fixture"], resources))


def example_tools(domain: Domain) -> dict[str, Tool]:
    """The tools of a domain, for their schemas. Those that answer from recordings can be called as well."""
    resources = Resources()
    try:
        return toolbox(domain.open(domain.fixture(domain.draw(random.Random(0), EXAMPLE)), resources))
    finally:
        resources.close()


def result_schema(tool: Tool) -> dict[str, Any]:
    """JSON schema of what a tool of a domain returns."""
    return _untitled(typing.get_type_hints(tool.function)["return"].model_json_schema())


def tokens() -> tuple[str, ...]:
    """Pieces of JSON that are the same in every call, result and answer, each of which becomes one token."""
    return tuple(dict.fromkeys(piece for domain in DOMAINS.values() for piece in _pieces(domain)))


def _recorded(schemas: list[dict[str, Any]], lines: list[dict[str, Any]]) -> Iterator[Tool]:
    """Tools of a user's folder. One of which nothing is recorded on this row is offered, and has no result."""
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
    """The schema without the titles, which say the names again. No property here is called `title`."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title"}
    return [_untitled(value) for value in schema] if isinstance(schema, list) else schema
