"""Messages between a `ProcessEngine` and its child process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.local.block import Layout
from mtrl.types import Generation

# -- from the parent --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Create the engine. The file descriptor of the block is sent before this message."""

    pickled: bytes
    """`(model, tokenizer, arguments, keywords)` for `LocalEngine`, pickled by `block.pack`."""
    layout: Layout


@dataclass(frozen=True)
class NewBlock:
    """Read weights from another block from now on. Its file descriptor is sent before this message."""

    layout: Layout


@dataclass(frozen=True)
class Load:
    """Copy the current weights of the block into the engine, as policy `version`."""

    number: int
    version: int
    from_block: bool
    """Whether the weights are read from the block. False: no block exists yet, and only the version changes."""


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
    """Ask the child whether it is alive."""


# -- from the child ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The answer to `Start`: the engine is ready."""


@dataclass(frozen=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to `Generate`."""

    number: int
    generation: Generation
    stats: EngineStats


@dataclass(frozen=True)
class Loaded:
    """The answer to `Load`: the child has finished reading the block."""

    number: int


@dataclass(frozen=True)
class Failed:
    """An error answer."""

    number: int | None
    """Number of the message that failed. None: `Start` or another message without which the child cannot serve."""
    error: str
    for_user: bool
    """Whether the error was a `UserError`."""
