"""What a run's folder holds, in pieces that are sent one by one and remembered by name and content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtrl.tracking.files import to_strict_json
from mtrl.types import Trajectory

_STEP = re.compile(r"metrics\.jsonl:(\d+)|trajectories/.*_step_(\d+)\.jsonl")

CLOCK = ("time/", "perf/")
"""Metrics that a step which is done anew has otherwise, though it is the same."""


@dataclass(frozen=True)
class Item:
    """One piece. It is sent once for each `digest` that it has had."""

    key: str
    """Where it is: `metrics.jsonl:12` (by step), `trajectories/train_step_000010.jsonl:3` (by line), `summary.json`."""
    digest: str

    is_counted: ClassVar[bool] = True


@dataclass(frozen=True)
class Settings(Item):
    """config.yaml, flattened: `trainer.optimizer.lr` -> value."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Row(Item):
    """The numbers of one step."""

    step: int
    metrics: Mapping[str, float]
    milliseconds: int
    """Wall time since 1970, by the clock of the run: the same whenever the row is sent."""


@dataclass(frozen=True)
class Episode(Item):
    """One trajectory."""

    file: str
    """`train_step_000010`"""
    line: int
    """From 1."""
    kind: str
    """train | eval_greedy | eval_sampled | disagree | …"""
    step: int
    verdict: str
    """agree | lenient | strict"""
    milliseconds: int
    """When its step was over."""
    trajectory: Trajectory


@dataclass(frozen=True)
class Artifact(Item):
    """A file that goes as it is."""

    path: Path


@dataclass(frozen=True)
class Whole(Item):
    """Nothing to send: all of a file of trajectories was."""

    is_counted: ClassVar[bool] = False


@dataclass(frozen=True)
class Unreadable(Item):
    """Nothing that could be sent."""

    why: str


@dataclass(frozen=True)
class Ended(Item):
    """How the run ended."""

    is_counted: ClassVar[bool] = False
    finished: bool


def step_of(key: str) -> int:
    """The step of a row or of a file of trajectories; -1 of what has none."""
    found = _STEP.match(key)
    return int(found[1] or found[2]) if found else -1


def digest(value: bytes | str | Mapping[str, Any]) -> str:
    """16 hexadecimal digits that tell contents apart."""
    if isinstance(value, Mapping):
        value = to_strict_json(value)
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.sha256(data).hexdigest()[:16]


def row_digest(row: Mapping[str, Any]) -> str:
    """Of a row, without what a clock decides."""
    return digest({key: value for key, value in row.items() if not key.startswith(CLOCK)})


def trajectory_digest(data: Mapping[str, Any]) -> str:
    """Of a trajectory, without what a clock decides."""
    turns = [{k: v for k, v in turn.items() if not k.startswith("seconds_")} for turn in data["turns"]]
    return digest({**data, "turns": turns})
