"""Tools: functions of a file, called by the JSON of a `<tool>`. Mistakes of the model become observations and are never
raised."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envs.triviaqa.user_file import functions_of
from mtrl.environments.tools import Tool, ToolError, tool, toolbox
from mtrl.errors import BackendError, UserError
from mtrl.utils.strict_json import strict_loads

KEY = "environment.config.tools_file"
DEFAULT_FILE = Path(__file__).with_name("wiki_search.py")
ERROR = "Error: "
"""Prefix of every result that reports an error."""
_OUR_FAULT = (UserError, BackendError)
"""Exceptions that fail the episode: the task or a server is broken, and the policy should not be trained on text about
it."""


def load_tools(path: str | None = None) -> dict[str, Tool]:
    """Return the tools of a file's `TOOL_FUNCTIONS`, by name; their schemas come from signatures and docstrings.

    Raises:
        UserError: the file or its list is invalid, a function has no docstring or a parameter without a type, or two
            functions have the same name.
    """
    functions = functions_of(path or DEFAULT_FILE, KEY, "TOOL_FUNCTIONS")
    try:
        return toolbox(*map(tool, functions))
    except UserError as error:
        raise UserError(f"{KEY}={path}: {error}") from error


def describe(tools: Mapping[str, Tool]) -> str:
    """Return one line of JSON per tool, for the prompt."""
    functions = (each.schema["function"] for each in tools.values())
    return "\n".join(
        json.dumps({"name": f["name"], "description": f["description"], "args": f["parameters"]}, ensure_ascii=False)
        for f in functions
    )


def call_tool(tools: Mapping[str, Tool], command: str) -> str:
    """Return the result of `{"name": …, "args": {…}}`; if the call is invalid or the tool fails, a text after "Error:
    ".

    Raises:
        UserError, BackendError: the task is broken, or what a tool runs on has failed, such as a retriever.
    """
    try:
        name, arguments = _parse(command)
        if name not in tools:
            raise ToolError(f"there is no tool {_harmless(name)}; the tools are: {', '.join(tools)}")
        result = tools[name].function(**tools[name].check(arguments))
    except _OUR_FAULT:
        raise
    except ToolError as error:
        return f"{ERROR}{error}"
    except ValidationError as error:
        return f"{ERROR}wrong arguments for {name}: {_problems(error)}"
    except Exception as error:
        # Only the type is included, because messages may hold paths of this machine, or times.
        return f"{ERROR}{name} failed: {type(error).__name__}"
    return _text(name, result) or f"{ERROR}{name} returned nothing"


def _parse(command: str) -> tuple[str, dict[str, Any]]:
    try:
        value = strict_loads(command)
    except ValueError:
        raise ToolError("the tool call is not valid JSON") from None
    if not isinstance(value, dict) or set(value) != {"name", "args"}:
        raise ToolError("a tool call is a JSON object with the keys name and args")
    if not isinstance(value["name"], str) or not isinstance(value["args"], dict):
        raise ToolError("in a tool call name is text and args is an object")
    return value["name"], value["args"]


def _text(name: str, result: Any) -> str:
    if isinstance(result, str):
        return result.strip()
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{KEY}: {name} returned {type(result).__name__}, which is not JSON; return text") from error


def _problems(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{_harmless('.'.join(map(str, each['loc'])))}: {each['msg']}" for each in details[:3])


def _harmless(name: str) -> str:
    """Return a name that the model invented, without characters that could form markup."""
    return re.sub(r"[^\w.-]+", "?", name[:64]) or "?"
