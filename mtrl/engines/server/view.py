"""The data about servers, which the leader controls, that a rollout worker needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtrl.engines.server.adapters import ServedAdapter


@dataclass(frozen=True)
class ReplicaView:
    """One server."""

    name: str
    url: str
    token: str | None
    """Token that every request must carry; None: the server asks for none."""
    versions: tuple[int, ...]
    """Policy versions of the server's weights since its start, the newest last."""
    is_current: bool
    """Whether it runs with the newest weights, so that turns may be sent to it."""
    adapter: ServedAdapter | None = None
    """Newest LoRA adapter, which samples new turns; None: the model itself samples them."""


@dataclass(frozen=True)
class ServersView:
    """All servers of an engine, after an update of their weights or the restart of one."""

    replicas: tuple[ReplicaView, ...]
    renamed: Mapping[int, int]
    """Policy version by the version number of the servers, where they differ."""
