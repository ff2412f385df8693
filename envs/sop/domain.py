"""One business domain: a procedure, its tools, and its cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.environments.base import Resources
from mtrl.environments.replay import Recordings, ReplayTools
from mtrl.environments.tools import toolbox

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""
Procedure = Generator[list[Call], list[dict[str, Any]], dict[str, str]]
"""Execution of a procedure: the generator yields the calls of a turn, receives their results, and returns the
answer."""


@dataclass(frozen=True)
class Domain:
    """A domain: functions that draw cases, run them, and give the right answers."""

    name: str
    order: str
    """One-word instruction for the tiny policy."""
    case: str
    """Name of the argument that identifies the case, such as `aircraft_id`."""
    folder: Path
    """Folder with `procedure.md`, the text for a language model, and `tools.json`, the specification of the production
    tools."""
    fields: Mapping[str, str]
    """Fields of the answer, in order, with a description of their values."""
    draw: Callable[[random.Random, str], dict[str, Any]]
    """Function from a random generator and a case's id to the case's hidden record."""
    decide: Callable[[dict[str, Any]], dict[str, str]]
    """Function from the hidden record to the right answer. It uses no tools, and serves only to create rows."""
    fixture: Callable[[dict[str, Any]], Any]
    """Function from the hidden record to the data that the tools answer from: JSON, stored in the row."""
    open: Callable[[Any, Resources], Any]
    """Function from the fixture to the object with the tools of one episode; its resources are registered for
    teardown."""
    follow: Callable[[str], Procedure]
    """Function from a case's id to the execution of the procedure, which uses only the tools."""

    @property
    def procedure(self) -> str:
        """Text of the procedure."""
        return (self.folder / "procedure.md").read_text(encoding="utf-8").strip()

    @property
    def spec(self) -> Path:
        return self.folder / "tools.json"


class RecordedTools:
    """Base class of tools that only read: they answer from the recordings of the row."""

    def __init__(self, lines: list[dict[str, Any]], resources: Resources):
        self.replay = ReplayTools(Recordings(lines))


def recording(tool: str, result: Any, /, **arguments: Any) -> dict[str, Any]:
    """Return one line of recordings."""
    return {"tool": tool, "arguments": arguments, "result": result}


def carry_out(domain: Domain, case: str, fixture: Any) -> tuple[list[list[Call]], dict[str, str]]:
    """Execute the procedure, and return the calls of each turn and the answer."""
    resources = Resources()
    try:
        tools = toolbox(domain.open(fixture, resources))
        following = domain.follow(case)
        turns = [next(following)]
        while True:
            results = [tools[name].function(**arguments).model_dump(mode="json") for name, arguments in turns[-1]]
            turns.append(following.send(results))
    except StopIteration as done:
        return turns, done.value
    finally:
        resources.close()


def drawn(weights: Mapping[str, float], rng: random.Random) -> str:
    """Draw one of the keys with a probability proportional to its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def code(rng: random.Random) -> str:
    """Draw a code of three digits."""
    return f"{rng.randrange(1000):03}"
