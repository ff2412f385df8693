"""Read-only tools that answer from recordings: the same call always gets the same answer, without a server.

A recording is a line of JSONL, `{"tool": "get_account", "arguments": {"id": "A1"}, "result": {"name": "Ann"}}`, or a
row of a table whose columns are arguments and results (`recordings_of_rows`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mtrl.environments.tools import Tool, ToolError
from mtrl.errors import UserError
from mtrl.types import Row
from mtrl.utils.files import in_home
from mtrl.utils.strict_json import canonical, strict_loads

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Recordings:
    """The recorded results of tools by their arguments. It is read-only; the episodes of a run share one."""

    def __init__(self, lines: Iterable[Mapping[str, Any]], source: str = "recordings"):
        """
        Args:
            lines: dicts with `tool`, `arguments` (an object) and `result` (any JSON).

        Raises:
            UserError: a line lacks one of the keys, or two lines have different results for the same call.
        """
        self._results: dict[str, dict[str, str]] = {}
        """tool -> canonical arguments -> result as JSON text, which is immutable"""
        self._values: dict[str, dict[str, list[Any]]] = {}
        """tool -> argument -> its recorded values"""
        for number, line in enumerate(lines, 1):
            self._add(line, f"{source}, line {number},")
        if not self._results:
            raise UserError(f"{source} holds no recordings; give at least one line with tool, arguments and result")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Recordings:
        """Read the recordings of a file.

        Raises:
            UserError: the file is missing, or a line is not JSON or is no recording.
        """
        file = in_home(path)
        if not file.is_file():
            raise UserError(f"recordings {file} do not exist; give a JSONL file with tool, arguments and result")
        with file.open(encoding="utf-8") as stream:
            lines = [_read(line, f"{file}, line {n},") for n, line in enumerate(stream, 1) if line.strip()]
        return cls(lines, str(file))

    def __contains__(self, tool: str) -> bool:
        return tool in self._results

    def __len__(self) -> int:
        return sum(map(len, self._results.values()))

    @property
    def tools(self) -> list[str]:
        """Names of the recorded tools, in the order of their first recording."""
        return list(self._results)

    def arguments(self, tool: str) -> list[str]:
        """Names of the recorded arguments of a tool."""
        return list(self._values[tool])

    def find(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return a copy of the result that was recorded for exactly this call.

        Raises:
            KeyError: the call was not recorded.
        """
        try:
            return json.loads(self._results[tool][canonical(dict(arguments))])
        except (TypeError, ValueError, RecursionError):  # arguments that are not JSON were never recorded
            raise KeyError(tool) from None

    def schema(self, tool: str, description: str = "") -> dict[str, Any]:
        """Return a schema in OpenAI's form, inferred from the recordings. Arguments of every call are required."""
        values, calls = self._values[tool], len(self._results[tool])
        parameters = {
            "type": "object",
            "properties": {name: _type_of(seen) for name, seen in values.items()},
            "required": [name for name, seen in values.items() if len(seen) == calls],
            "additionalProperties": False,
        }
        description = description or f"Look up {tool}."
        return {"type": "function", "function": {"name": tool, "description": description, "parameters": parameters}}

    def _add(self, line: Mapping[str, Any], where: str) -> None:
        tool, arguments = line.get("tool"), line.get("arguments")
        if not isinstance(tool, str) or not isinstance(arguments, Mapping) or "result" not in line:
            raise UserError(f"{where} is no recording; it needs tool (text), arguments (an object) and result")
        try:
            key, result = canonical(dict(arguments)), json.dumps(line["result"], ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"{where} is not JSON ({error})") from error
        results = self._results.setdefault(tool, {})
        if key in results:
            if results[key] != result:
                raise UserError(f"{where} answers a call of {tool} otherwise than a line before; keep one of them")
            return
        results[key] = result
        values = self._values.setdefault(tool, {})
        for name, value in arguments.items():
            values.setdefault(name, []).append(value)


def recordings_of_rows(
    tool: str, rows: Iterable[Row], arguments: Sequence[str] | Mapping[str, str], results: Sequence[str]
) -> list[dict[str, Any]]:
    """Make recordings from a table: each row is the answer to the call with its own values.

    Args:
        arguments: names of the argument columns, or `{argument: column}` if the names differ.
        results: names of the columns that form the answer.

    Raises:
        UserError: a row lacks a column.
    """
    columns = arguments if isinstance(arguments, Mapping) else {name: name for name in arguments}
    lines = []
    for number, row in enumerate(rows, 1):
        if missing := [column for column in (*columns.values(), *results) if column not in row]:
            raise UserError(f"row {number} of the recordings of {tool} has no column {missing[0]}")
        lines.append(
            {
                "tool": tool,
                "arguments": {name: row[column] for name, column in columns.items()},
                "result": {column: row[column] for column in results},
            }
        )
    return lines


class ReplayTools:
    """The recorded tools of one episode, with counts. They are tools themselves, or typed tools call them::

    recordings = Recordings.from_jsonl("accounts.jsonl")        # once

    class Support(ToolEnvironment):
        def reset(self, row):
            super().reset(row)
            self.replay = ReplayTools(recordings)
            self.toolbox |= toolbox(*self.replay.tools())       # all tools, schemas from the recordings

        @tool
        def get_account(self, id: str) -> dict:                 # or one by one, with production's schema
            '''The account of an id.'''
            return self.replay.call("get_account", id=id)
    """

    def __init__(self, recordings: Recordings):
        self.recordings = recordings
        self.calls: Counter[str] = Counter()
        """Number of calls per tool, including those without a recording."""
        self.misses: Counter[str] = Counter()
        """Number of calls per tool that have no recording."""

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """Return the recorded result of this call.

        Raises:
            ToolError: the call was not recorded. The error names the arguments of the tool but no value, because values
                are answers.
            UserError: the tool was never recorded, so the task is broken.
        """
        if tool not in self.recordings:
            raise UserError(f"tool {tool} has no recordings; there are some of {', '.join(self.recordings.tools)}")
        self.calls[tool] += 1
        try:
            return self.recordings.find(tool, arguments)
        except KeyError:
            self.misses[tool] += 1
        known = ", ".join(self.recordings.arguments(tool)) or "none"
        raise ToolError(f"{tool} has no result for these arguments; the arguments that it knows are: {known}") from None

    def tools(self, schemas: Iterable[Mapping[str, Any]] = ()) -> list[Tool]:
        """Return the recorded tools; `schemas` (OpenAI's form) replace those inferred from the recordings.

        Raises:
            UserError: a schema belongs to a tool that was never recorded.
        """
        given = {schema["function"]["name"]: dict(schema) for schema in schemas}
        if missing := [name for name in given if name not in self.recordings]:
            raise UserError(f"tool {missing[0]} has a schema and no recordings; record it, or leave the schema out")
        return [
            Tool(name, given.get(name) or self.recordings.schema(name), partial(self.call, name))
            for name in self.recordings.tools
        ]


def _read(line: str, where: str) -> dict[str, Any]:
    try:
        value = strict_loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is no recording; it needs tool (text), arguments (an object) and result")
    return value


def _type_of(values: list[Any]) -> dict[str, Any]:
    """Return the JSON type that all values share; an empty schema if they share none."""
    kinds = {_TYPES.get(type(value)) for value in values}
    if kinds == {"integer", "number"}:
        kinds = {"number"}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind} if kind else {}
