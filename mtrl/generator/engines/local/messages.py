"""What an engine in a process of its own and its parent tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrl.generator.engines.base import EngineStats, Generation, SamplingParams
from mtrl.generator.engines.local.block import Layout

# -- from the parent --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Make the engine. The file of the block comes with it."""

    pickled: bytes
    """`(model, tokenizer, arguments, keywords)` of `LocalEngine`, as `block.pack` has it."""
    layout: Layout


@dataclass(frozen=True)
class NewBlock:
    """Weights are from now on in another block, whose file comes with this."""

    layout: Layout


@dataclass(frozen=True)
class Load:
    """Copy the weights that are in the block now and call them `version`."""

    number: int
    version: int
    from_block: bool
    """False: there is no block yet, and only the version changes."""


@dataclass(frozen=True)
class Open:
    trajectory_id: str


@dataclass(frozen=True)
class Generate:
    number: int
    trajectory_id: str
    prompt: Any
    sampling: SamplingParams


@dataclass(frozen=True)
class Release:
    trajectory_id: str


@dataclass(frozen=True)
class Ping:
    """Give a sign of life."""


# -- from the child ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The engine is made."""


@dataclass(frozen=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(frozen=True)
class Turn:
    """The answer to `Generate`."""

    number: int
    generation: Generation
    stats: EngineStats


@dataclass(frozen=True)
class Loaded:
    """The answer to `Load`: nobody reads the block any more."""

    number: int


@dataclass(frozen=True)
class Failed:
    """The answer to the message of this number; None: to `Start` or another without which nothing can be served."""

    number: int | None
    error: str
    for_user: bool
    """Whether it was a `UserError`."""
