"""Read-only tools that answer from recordings: the same call always gets the same answer, and no server is needed.

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
from mtrl.strict_json import canonical, strict_loads
from mtrl.types import Row

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Recordings:
    """What every tool answered to which arguments. Read-only once made; the episodes of a run share one."""

    def __init__(self, lines: Iterable[Mapping[str, Any]], source: str = "recordings"):
        """
        Args:
            lines: dicts with `tool`, `arguments` (an object) and `result` (any JSON).

        Raises:
            UserError: a line without one of the keys, or two results for the same call.
        """
        self._results: dict[str, dict[str, str]] = {}
        """tool -> canonical arguments -> result as JSON text, which nobody can change"""
        self._values: dict[str, dict[str, list[Any]]] = {}
        """tool -> argument -> the values that were recorded of it"""
        for number, line in enumerate(lines, 1):
            self._add(line, f"{source}, line {number},")
        if not self._results:
            raise UserError(f"{source} holds no recordings; give at least one line with tool, arguments and result")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Recordings:
        """The recordings of a file.

        Raises:
            UserError: the file is missing, or a line is not JSON or is no recording.
        """
        file = Path(path).expanduser()
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
        """Names of the arguments that were recorded of a tool."""
        return list(self._values[tool])

    def find(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """What was recorded for exactly this call; a copy.

        Raises:
            KeyError: nothing was.
        """
        try:
            return json.loads(self._results[tool][canonical(dict(arguments))])
        except (TypeError, ValueError, RecursionError):  # arguments that are not JSON were never recorded
            raise KeyError(tool) from None

    def schema(self, tool: str, description: str = "") -> dict[str, Any]:
        """A schema in OpenAI's form, read off the recordings: what every call had is required."""
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
    """Recordings made from a table: each row is the answer to the call with its own values.

    Args:
        arguments: columns that are arguments, or `{argument: column}` where they are called otherwise.
        results: columns that the tool answers with.

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
    """The recorded tools of one episode, with counts. Either its own tools, or asked by typed ones::

    recordings = Recordings.from_jsonl("accounts.jsonl")        # once

    class Support(ToolEnvironment):
        def reset(self, row):
            super().reset(row)
            self.replay = ReplayTools(recordings)
            self.toolbox |= toolbox(*self.replay.tools())       # all of them, schemas read off the recordings

        @tool
        def get_account(self, id: str) -> dict:                 # or one by one, with the schema of production
            '''The account of an id.'''
            return self.replay.call("get_account", id=id)
    """

    def __init__(self, recordings: Recordings):
        self.recordings = recordings
        self.calls: Counter[str] = Counter()
        """Calls per tool, those without a recording among them."""
        self.misses: Counter[str] = Counter()
        """Calls per tool for which nothing was recorded."""

    def call(self, tool: str, /, **arguments: Any) -> Any:
        """What was recorded for this call.

        Raises:
            ToolError: nothing was. It names the arguments that the tool knows, and never a value: those are answers.
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
        """A tool for each that was recorded; `schemas` (OpenAI's form) replace those read off the recordings.

        Raises:
            UserError: a schema of a tool that was never recorded.
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
    """The type that all values share; none is claimed where they share none."""
    kinds = {_TYPES.get(type(value)) for value in values}
    if kinds == {"integer", "number"}:
        kinds = {"number"}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind} if kind else {}
