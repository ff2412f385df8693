"""Sending of a run: to one tracker after the other, or to all of them while the run grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from mtrl.config.schema import TrackerConfig
from mtrl.errors import UserError
from mtrl.record.metrics import unfinished_row
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.trackers.follower import Follower
from mtrl.trackers.followers import Followers, error_line
from mtrl.trackers.receipts import BusyError, folder_of
from mtrl.trackers.start import follower_of

FOLLOW_SECONDS = 2.0
"""Seconds between two checks of the folder of a live run."""


@dataclass
class SendResult:
    """Result for one tracker."""

    name: str
    sent: int = 0
    """Number of pieces that the tracker has, from this call and earlier ones."""
    left: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    url: str = ""
    hint: str = ""
    problem: str = ""
    """Reason why pieces are left."""
    is_busy: bool = False
    """Whether another process, such as the run itself, is sending."""

    @property
    def is_done(self) -> bool:
        return self.is_busy or not (self.left or self.problem)


def send(run: RunDir, tracker: TrackerConfig, warn: Callable[[str], Any]) -> list[SendResult]:
    """Send the unsent pieces to every tracker of `report_to`. `warn` is called for refused pieces, and for a last row
    without a line end."""
    outcomes = [_each(name, run, tracker, lambda each: _send_rest(each, run, warn)) for name in tracker.report_to]
    if sentence := unfinished_row(run.metrics):
        warn(sentence)
    return outcomes


def follow(run: RunDir, tracker: TrackerConfig, warn: Callable[[str], Any]) -> list[SendResult]:
    """Send new pieces until the run is over or the user interrupts."""
    opened: list[Follower] = []
    outcomes: list[SendResult] = []
    for name in tracker.report_to:
        outcome = _each(name, run, tracker, opened.append, stays_open=True)
        outcomes += [outcome] if outcome.is_busy else []
    followers = Followers(opened, warn, is_run=False)
    try:
        while opened and not opened[0].folder.run.is_over:
            time.sleep(FOLLOW_SECONDS)
            followers.poke()
        if opened and opened[0].folder.run.was_killed:
            warn(
                f"{run} counts as killed, since it has no process on this machine and no longer writes; "
                "if it goes on, repeat the command"
            )
    except KeyboardInterrupt:
        pass
    followers.close()
    return [*outcomes, *map(_outcome, opened)]


def _each(
    name: str, run: RunDir, tracker: TrackerConfig, act: Callable[[Follower], Any], stays_open: bool = False
) -> SendResult:
    try:
        follower = follower_of(name, run, tracker)
    except BusyError:
        return SendResult(name, is_busy=True)
    except OSError as error:
        raise UserError(
            f"{folder_of(run)} cannot be written ({error.strerror}); make it writable, because it records what was sent"
        ) from error
    problem = ""
    try:
        act(follower)
    except Exception as error:  # a tracker may raise anything
        problem = error_line(error)
    outcome = _outcome(follower, problem)
    if not stays_open:
        follower.release()
    return outcome


def _send_rest(follower: Follower, run: RunDir, warn: Callable[[str], Any]) -> None:
    # A run that reports to this tracker holds its journal while it lives. This process holds it, so the run is over.
    tracker = Run(run.path).stored_config.tree.get("tracker") or {}
    was_its_own = follower.backend.name in (tracker.get("report_to") or [])
    screen = Console(stderr=True)
    with screen.status(f"sending to {follower.backend.name}") if screen.is_terminal else nullcontext():
        try:
            follower.advance(final=True, is_over=was_its_own)
            follower.close()
        finally:
            if refusals := follower.refusals():
                warn(refusals)


def _outcome(follower: Follower, problem: str = "") -> SendResult:
    receipts = follower.receipts
    return SendResult(
        follower.backend.name,
        receipts.sent,
        follower.left(),
        len(receipts.refused),
        follower.url(),
        follower.hint(),
        problem,
    )


def lines(outcomes: Sequence[SendResult]) -> list[str]:
    """Return one line per tracker, aligned in columns."""
    name_width = max(len(outcome.name) for outcome in outcomes)
    counts = [
        "being sent by the run itself" if o.is_busy else f"sent {o.sent:>6,}   left {sum(o.left.values()):>6,}"
        for o in outcomes
    ]
    width = max(map(len, counts))
    shown = []
    for outcome, count in zip(outcomes, counts, strict=True):
        refused = f"   {outcome.refused} refused" if outcome.refused else ""
        shown.append(f"{outcome.name:<{name_width}}   {count:<{width}}   {outcome.url}{refused}".rstrip())
    return shown
