"""One business domain: a procedure, the tools that it uses, and the cases on which it is carried out."""

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
"""A tool's name and arguments."""
Procedure = Generator[list[Call], list[dict[str, Any]], dict[str, str]]
"""A procedure that is carried out: it yields the calls of a turn, is sent their results, and returns the answer."""


@dataclass(frozen=True)
class Domain:
    """What is needed to draw cases, to play them, and to say what is right."""

    name: str
    order: str
    """One word that tells the tiny policy what to do."""
    case: str
    """Name of the argument that says which case it is, such as `aircraft_id`."""
    folder: Path
    """Holds `procedure.md`, what a language model reads, and `tools.json`, the specification of production."""
    fields: Mapping[str, str]
    """Fields of the answer, in order, and what each may hold."""
    draw: Callable[[random.Random, str], dict[str, Any]]
    """From a case's id to its hidden record."""
    decide: Callable[[dict[str, Any]], dict[str, str]]
    """From the hidden record to the right answer. Only rows are made with it; it knows no tools."""
    fixture: Callable[[dict[str, Any]], Any]
    """From the hidden record to what the tools answer from: JSON, which the row carries."""
    open: Callable[[Any, Resources], Any]
    """From the fixture to the object with the tools of one episode; what it takes is registered for teardown."""
    follow: Callable[[str], Procedure]
    """The procedure, carried out on a case by its id, with nothing but the tools."""

    @property
    def procedure(self) -> str:
        """The procedure as text."""
        return (self.folder / "procedure.md").read_text(encoding="utf-8").strip()

    @property
    def spec(self) -> Path:
        return self.folder / "tools.json"


class RecordedTools:
    """Base of tools that only read: they answer from the recordings of the row."""

    def __init__(self, lines: list[dict[str, Any]], resources: Resources):
        self.replay = ReplayTools(Recordings(lines))


def recording(tool: str, result: Any, /, **arguments: Any) -> dict[str, Any]:
    """One line of recordings."""
    return {"tool": tool, "arguments": arguments, "result": result}


def carry_out(domain: Domain, case: str, fixture: Any) -> tuple[list[list[Call]], dict[str, str]]:
    """The calls of each turn, and the answer, of somebody who follows the procedure to the letter."""
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
    """One of the keys, as often as its weight says."""
    return rng.choices(list(weights), list(weights.values()))[0]


def code(rng: random.Random) -> str:
    """Three digits."""
    return f"{rng.randrange(1000):03}"
