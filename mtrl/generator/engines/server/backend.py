"""What differs between the engines that run as servers: their words and how one is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mtrl.config.engine_schema import ServerConfig
from mtrl.generator.engines.server.api import ServerApi


@dataclass(frozen=True)
class Command:
    """What starts a server."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of a scrubbed environment."""


@dataclass(frozen=True)
class Place:
    """Where a server is to listen, and what it may use."""

    port: int
    token: str
    """What every request has to show."""
    devices: Sequence[int] | None = None
    """Its GPUs; None: all that there are, or none."""


@dataclass(frozen=True)
class Backend:
    """An engine with its settings."""

    name: str
    """vllm | sglang"""
    settings: ServerConfig
    make_api: Callable[[str, str | None], ServerApi]
    """From a server's URL and its token."""
    make_command: Callable[[Place], Command]
    """How a server is started there."""
