"""Kills one run at random moments, and audits its folder after each kill and at its end."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from audit import Audit, Plan, audit_finished, audit_killed
from targets import Target, command_of, engines, family, kill

from mtrl.trainer.checkpoint.checkpoint import Checkpoints

LONGEST = 300.0
"""Time limit in seconds for a run to continue or to end, on a busy machine."""


@dataclass(frozen=True)
class Moments:
    """Moments of the kills: the share of each kind of moment, and the greatest delay of a kill after it."""

    shares: Mapping[str, float] = field(default_factory=lambda: {"start": 0.2, "step": 0.4, "save": 0.4})
    """start: after the start of an attempt; step: after some steps, anywhere in a step; save: while a checkpoint is
    half-written."""
    start_seconds: float = 6.0
    step_seconds: float = 0.5
    save_seconds: float = 0.01
    least_steps: int = 1
    steps: int = 3
    """Least and greatest number of steps between the last checkpoint and the kill."""


@dataclass
class Kill:
    """One kill, and the state of the folder after it."""

    moment: str
    """Kind of the moment: start, step or save."""
    step: int
    """Last step in metrics.jsonl."""
    left_half: bool
    """Whether a checkpoint was half-written."""
    audit: Audit


@dataclass
class Story:
    """The kills of a run, and its audits."""

    target: str
    name: str
    kills: list[Kill] = field(default_factory=list)
    end: Audit = field(default_factory=Audit)
    failure: str | None = None
    """Reason why the run did not end, or why a process of it still runs; None if neither is the case."""

    @property
    def audits(self) -> list[Audit]:
        return [*(kill.audit for kill in self.kills), self.end]

    @property
    def faults(self) -> list[str]:
        """All faults in words."""
        return [*([self.failure] if self.failure else []), *(fault for audit in self.audits for fault in audit.faults)]


class Killer:
    """Makes one run, kills it and audits it."""

    def __init__(self, target: Target, run_dir: Path, overrides: Sequence[str], rng: random.Random, moments: Moments):
        self.target, self.run_dir, self.overrides, self.rng, self.moments = target, run_dir, overrides, rng, moments
        self.plan = Plan.of([*overrides, *target.overrides])
        self.story = Story(target.name, run_dir.name)

    def run(self, kills: int, undisturbed: Path | None = None) -> Story:
        """Start the run, kill it at most `kills` times, and wait until it ends."""
        self.process = self.target.start(self.run_dir, self.overrides)
        self.seen, self.halves = written(self.run_dir), half_written(self.run_dir)
        try:
            while len(self.story.kills) < kills and (moment := self._wait()) is not None:
                self._kill(moment)
            until(lambda: self.process.poll() is not None, "it has not ended")
            if self.process.returncode:
                raise RuntimeError(f"it ended with {self.process.returncode}")
            self.story.end = audit_finished(self.run_dir, self.plan, undisturbed if self.target.is_exact else None)
        except (RuntimeError, TimeoutError) as error:
            self.story.failure = f"{self.run_dir}: {error}"
        finally:
            if self.process.poll() is None:
                kill(family(self.process.pid))
                self.process.wait()
        return self.story

    def _wait(self) -> str | None:
        """Wait until the next kill. Return the kind of its moment, or None if the run has ended before."""
        moment = self.rng.choices(list(self.moments.shares), list(self.moments.shares.values()))[0]
        past = [kill.moment for kill in self.story.kills[-1:]]
        if self.target.name == "engine" and past in ([], ["start"]):
            moment = "step"  # the run rightly ends if its engine repeatedly dies during its start
        self._until(lambda: self.target.processes(self.process.pid))
        if moment == "start":
            time.sleep(self.rng.uniform(0, self.moments.start_seconds))
        else:
            # The new engine must have answered: the groups of two steps may have been complete before the last kill.
            steps = self.rng.randint(self.moments.least_steps, self.moments.steps) + (
                2 if self.target.name == "engine" else 0
            )
            step = newest_checkpoint(self.run_dir) + steps
            self._until(lambda: written(self.run_dir) != self.seen and last_step(self.run_dir) >= step)
            time.sleep(self.rng.uniform(0, self.moments.step_seconds))
        if moment == "save":
            self._until(lambda: half_written(self.run_dir) - self.halves, pace=0.001)
            time.sleep(self.rng.uniform(0, self.moments.save_seconds))
        return moment if self.process.poll() is None else None

    def _kill(self, moment: str) -> None:
        attempt = self.target.processes(self.process.pid)
        victims = [self.rng.choice(attempt)] if self.target.kills_one else attempt
        doomed = attempt if self.target.goes_on else [*attempt, *engines(self.process.pid)]
        if not victims:
            raise RuntimeError("there was no process to kill")
        kill(victims)
        if not self.target.goes_on:
            self.process.wait()
        until(lambda: not any(map(command_of, doomed)), "a killed process still runs")
        left_half = bool(half_written(self.run_dir) - self.halves)
        self.seen, self.halves = written(self.run_dir), half_written(self.run_dir)
        audit = audit_killed(self.run_dir, self.plan)
        self.story.kills.append(Kill(moment, last_step(self.run_dir), left_half, audit))
        if not self.target.goes_on:
            self.process = self.target.start(self.run_dir, self.overrides, resume=True)

    def _until(self, holds: Callable[[], object], pace: float = 0.02) -> None:
        """Wait until `holds` is true, or the run has ended."""
        until(lambda: holds() or self.process.poll() is not None, "it does not continue", pace)


def until(holds: Callable[[], object], otherwise: str, pace: float = 0.02) -> None:
    """Wait until `holds` is true.

    Raises:
        TimeoutError: `holds` was false for `LONGEST` seconds.
    """
    limit = time.monotonic() + LONGEST
    while not holds():
        if time.monotonic() > limit:
            raise TimeoutError(f"{otherwise} after {LONGEST:g} s")
        time.sleep(pace)


def written(run_dir: Path) -> int:
    """Return the time in ns at which metrics.jsonl was last written, 0 without one."""
    path = run_dir / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def last_step(run_dir: Path) -> int:
    """Return the last step with a complete row of metrics, 0 without one."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    newest = Checkpoints(run_dir / "checkpoints").latest()
    return int(newest.name.removeprefix("step_")) if newest else 0


def half_written(run_dir: Path) -> set[Path]:
    """Return the checkpoints that are being written, or that were being written when the run was killed."""
    return {path for path in (run_dir / "checkpoints").glob(".partial-*") if not path.name.endswith("-old")}
