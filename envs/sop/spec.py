"""Comparison of the offered tools with the production tools: request and response, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.sop.domain import Domain
from envs.sop.domains import example_tools, result_schema
from mtrl.errors import UserError
from mtrl.utils.strict_json import canonical, strict_loads

Spec = dict[str, Any]
"""One tool: name, description, request (JSON schema), and response if it is known."""


def check_tools(domain: Domain, path: str | Path) -> None:
    """Compare the tools of a domain with the specification in a file.

    Raises:
        UserError: the file is no specification, or a tool differs; the message names the first difference.
    """
    differences = list(compare(offered(domain), read_specs(path)))
    if differences:
        raise UserError(
            f"environment.config.tools_spec={path}: the tools of {domain.name} differ in {len(differences)} places, "
            f"the first: {differences[0]}; correct the file, or the tools"
        )


def offered(domain: Domain) -> list[Spec]:
    """Return the tools of a domain as the model sees them, with the schemas of their results."""
    return [{**parse_spec(tool.schema), "response": result_schema(tool)} for tool in example_tools(domain).values()]


def read_specs(path: str | Path) -> list[Spec]:
    """Read the specifications of a JSON file: a list of tools in the form of OpenAI, Bedrock or MCP.

    Raises:
        UserError: the file is missing, or holds no such list.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"{file} does not exist; give a JSON file with a list of tools")
    try:
        values = strict_loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); write a list of tools") from error
    if not isinstance(values, list) or not values:
        raise UserError(f"{file} holds no list of tools")
    return [parse_spec(value, str(file)) for value in values]


def parse_spec(value: Any, source: str = "the specification") -> Spec:
    """Parse one tool, from OpenAI's `{"function": …}`, Bedrock's `{"toolSpec": …}` or MCP's `{"name": …, "inputSchema":
    …}`.

    Raises:
        UserError: the value has none of these forms.
    """
    body = value.get("function") or value.get("toolSpec") or value if isinstance(value, Mapping) else {}
    request = body.get("parameters", body.get("inputSchema"))
    response = body.get("outputSchema")
    request, response = (s["json"] if isinstance(s, Mapping) and "json" in s else s for s in (request, response))
    if not isinstance(body.get("name"), str) or not isinstance(request, Mapping):
        raise UserError(f"{source} holds a tool without a name or a request schema: {json.dumps(value)[:80]}")
    spec = {"name": body["name"], "description": body.get("description", ""), "request": dict(request)}
    return spec if response is None else {**spec, "response": dict(response)}


def compare(found: list[Spec], wanted: list[Spec]) -> Iterator[str]:
    """Yield every difference, as `tool.place: offered …, specified …`. A response is compared only if one is
    specified."""
    tools, specs = ({spec["name"]: spec for spec in side} for side in (found, wanted))
    for name in sorted(tools.keys() ^ specs.keys()):
        yield f"{name} is " + ("specified and not offered" if name in specs else "offered and not specified")
    for name in sorted(tools.keys() & specs.keys()):
        for part in specs[name]:
            yield from _compare(tools[name].get(part), specs[name][part], f"{name}.{part}")


def _compare(found: Any, wanted: Any, place: str) -> Iterator[str]:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted(found.keys() | wanted.keys()):
            yield from _compare(found.get(key), wanted.get(key), f"{place}.{key}")
    elif _unordered(found, place) != _unordered(wanted, place):
        yield f"{place}: offered {json.dumps(found)}, specified {json.dumps(wanted)}"


def _unordered(value: Any, place: str) -> str:
    """Return a text for comparison, in which the order of `required` and `enum` has no effect."""
    if place.endswith((".required", ".enum")) and isinstance(value, list):
        value = sorted(value, key=canonical)
    return canonical(value)
