"""The differences between the engines that run as servers: their API and the command that starts a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.server_api import ServerApi


@dataclass(frozen=True)
class ServerCommand:
    """The command that starts a server."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, added to a scrubbed environment."""


@dataclass(frozen=True)
class ServerPlace:
    """The port, token and GPUs of a server."""

    port: int
    token: str
    """Token that every request must carry."""
    devices: Sequence[int] | None = None
    """Indices of the server's GPUs among those that this process sees; None: all GPUs, if there are any."""


@dataclass(frozen=True)
class ServerBackend:
    """An engine with its settings."""

    name: str
    """Name of the engine: vllm | sglang"""
    settings: ServerConfig
    make_api: Callable[[str, str | None], ServerApi]
    """Function that makes the API of a server from its URL and its token."""
    make_command: Callable[[ServerPlace], ServerCommand]
    """Function that makes the command of a server from its place."""
