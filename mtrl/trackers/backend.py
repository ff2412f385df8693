"""The interface of a tracker, which receives the pieces of a run, one kind after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtrl.record.run_dir import RunDir
from mtrl.trackers.items import Artifact, Ended, MetricsRow, RunSettings, SentTrajectory
from mtrl.trackers.receipts import Receipts


class RefusedItemError(Exception):
    """The tracker answers, but will never accept this piece."""


class ReopenError(Exception):
    """The next piece has an earlier step than one that was already sent, so the tracker must be opened again."""


@dataclass(frozen=True)
class Identity:
    """Identity of a run."""

    id: str
    """Id of 32 hexadecimal digits, the same for every tracker and every resumption."""
    name: str
    """Name to display, such as `gsm8k 2026-01-31_10-20-30`."""
    started: int
    """Start of the run, in milliseconds since 1970."""
    facts: dict[str, str]
    """Facts for tags, by name: the commit, versions, the task, the seed."""


class TrackerBackend(Protocol):
    """One tracker. Every call may take long and may fail; a failed call is repeated later.

    A piece may be sent a second time, after a kill between its arrival and its receipt. A repeated send must change
    nothing.
    """

    name: str
    place: BackendInputs
    episodes_at_once: int | None
    """Maximum number of trajectories per call; None: all trajectories of a file."""
    is_buffered: bool
    """Whether sent pieces arrive only when the backend is closed."""

    @property
    def destination(self) -> str:
        """Stable description of the destination: the same destination always has the same words."""

    def url(self, remote: dict[str, str]) -> str:
        """Return the address at which a person can view the run."""

    def hint(self, remote: dict[str, str]) -> str:
        """Return the command that shows the run or uploads it; empty if no command is needed."""

    def open(self, receipts: Receipts, first_step: int) -> None:
        """Connect, and find or create the run. Receipts of pieces that have not arrived are removed."""

    def send_settings(self, settings: RunSettings) -> None: ...

    def send_rows(self, rows: Sequence[MetricsRow]) -> None: ...

    def send_episodes(self, episodes: Sequence[SentTrajectory]) -> None: ...

    def send_artifact(self, artifact: Artifact) -> None: ...

    def send_ended(self, ended: Ended) -> None: ...

    def close(self) -> None:
        """Wait until everything that was sent has arrived."""


@dataclass(frozen=True)
class BackendInputs:
    """Inputs of a backend: the run, its identity and the settings of the trackers."""

    run: RunDir
    identity: Identity
    tracker: Any
    """Settings of the trackers (`TrackerConfig`)."""

    @property
    def folder(self) -> Path:
        """Parent folder of the run, which holds the other runs of its kind."""
        return self.run.path.resolve().parent
