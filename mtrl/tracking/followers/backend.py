"""What a tracker is: something that takes the pieces of a run, one kind after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtrl.tracking.followers.items import Artifact, Ended, Episode, Row, Settings
from mtrl.tracking.followers.receipts import Receipts
from mtrl.tracking.run_dir import RunDir


class RefusedError(Exception):
    """The tracker is there and will not take this piece, now or later."""


class ReopenError(Exception):
    """What is to be sent lies before what was sent: the tracker must be opened anew."""


@dataclass(frozen=True)
class Identity:
    """Who a run is."""

    id: str
    """32 hexadecimal digits, the same for every tracker and every resumption."""
    name: str
    """`gsm8k 2026-01-31_10-20-30`"""
    started: int
    """Milliseconds since 1970."""
    facts: dict[str, str]
    """What is worth a tag: the commit, versions, the task, the seed."""


class Backend(Protocol):
    """One tracker. Every call may take long and may fail; what failed is asked again later.

    A piece may be sent a second time, after a kill between its arrival and its receipt: that must change nothing.
    """

    name: str
    place: Place
    episodes_at_once: int | None
    """How many trajectories one call takes; None: all of a file."""
    is_buffered: bool
    """What it took has arrived only when it was closed."""

    @property
    def destination(self) -> str:
        """Where it sends to, in words that stay the same for the same place."""

    def url(self, remote: dict[str, str]) -> str:
        """Where a person looks at the run."""

    def hint(self, remote: dict[str, str]) -> str:
        """The command that shows it or sends it on; empty: none is needed."""

    def open(self, receipts: Receipts, first_step: int) -> None:
        """Connect, and find or make the run. It strikes out receipts of what has not arrived after all."""

    def send_settings(self, settings: Settings) -> None: ...

    def send_rows(self, rows: Sequence[Row]) -> None: ...

    def send_episodes(self, episodes: Sequence[Episode]) -> None: ...

    def send_artifact(self, artifact: Artifact) -> None: ...

    def send_ended(self, ended: Ended) -> None: ...

    def close(self) -> None:
        """Everything that was sent has arrived when this returns."""


@dataclass(frozen=True)
class Place:
    """What a backend is made from: which run, and the settings of the trackers."""

    run: RunDir
    identity: Identity
    tracker: Any
    """TrackerConfig"""

    @property
    def folder(self) -> Path:
        """Where runs of this kind lie side by side."""
        return self.run.path.resolve().parent
