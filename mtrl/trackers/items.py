"""The pieces of a run's folder, which are sent one by one and remembered by name and content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtrl.console.episode_view import message_text
from mtrl.types import Message, Trajectory
from mtrl.utils.files import to_strict_json
from mtrl.utils.text import clean, cut, one_line, signed

_STEP = re.compile(r"metrics\.jsonl:(\d+)|trajectories/.*_step_(\d+)\.jsonl")

LONGEST_MESSAGE = 4000
"""Maximum length of a message in the text of a conversation, in characters."""
CLOCK = ("time/", "perf/")
"""Prefixes of metrics that depend on the clock, so they differ when a step is repeated with the same result."""


@dataclass(frozen=True)
class Item:
    """One piece of a run. It is sent once for each `digest` that it has had."""

    key: str
    """Location of the piece: `metrics.jsonl:12` (step), `trajectories/train_step_000010.jsonl:3` (line),
    `summary.json`."""
    digest: str

    is_counted: ClassVar[bool] = True


@dataclass(frozen=True)
class RunSettings(Item):
    """The content of config.yaml, flattened: `trainer.optimizer.lr` -> value."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class MetricsRow(Item):
    """The metrics of one step."""

    step: int
    metrics: Mapping[str, float]
    milliseconds: int
    """Time of the step in milliseconds since 1970, computed from the durations of the run's steps, so it does not
    depend on when the row is sent."""


@dataclass(frozen=True)
class SentTrajectory(Item):
    """One trajectory."""

    file: str
    """Name of the file without its suffix, such as `train_step_000010`."""
    line: int
    """Number of the line, from 1."""
    kind: str
    """Kind of the file: train | eval_greedy | eval_sampled | disagree | …"""
    step: int
    verdict: str
    """Agreement of reward and scorer: agree | lenient | strict"""
    milliseconds: int
    """End of its step, in milliseconds since 1970."""
    trajectory: Trajectory


@dataclass(frozen=True)
class Artifact(Item):
    """A file that is sent unchanged."""

    path: Path


@dataclass(frozen=True)
class Whole(Item):
    """Mark that all trajectories of a file have been sent. It is never sent itself."""

    is_counted: ClassVar[bool] = False


@dataclass(frozen=True)
class UnreadableItem(Item):
    """A piece that cannot be read, so it is never sent."""

    why: str


@dataclass(frozen=True)
class Ended(Item):
    """The end of the run: finished or stopped."""

    is_counted: ClassVar[bool] = False
    finished: bool


def conversation(trajectory: Trajectory, longest: int) -> str:
    """Return a trajectory as plain text: the messages with their roles and the reward of each turn, cleaned and cut to
    about `longest` characters."""
    lines: list[str] = []
    for number, turn in enumerate(trajectory.turns):
        lines += map(_message, turn.observation)
        head = f"[assistant, turn {number}, reward {signed(turn.reward)}]"
        lines.append(f"{head}\n{cut(turn.text, LONGEST_MESSAGE, 1)}")
    lines += map(_message, trajectory.final_observation)
    return clean(cut("\n".join(lines), longest, 1))


def _message(message: Message) -> str:
    return f"[{one_line(message.get('role', '?'), 20)}]\n{cut(message_text(message), LONGEST_MESSAGE, 1)}"


def step_of(key: str) -> int:
    """Return the step of a row or of a file of trajectories; -1 for other keys."""
    found = _STEP.match(key)
    return int(found[1] or found[2]) if found else -1


def digest(value: bytes | str | Mapping[str, Any]) -> str:
    """Return a digest of a content, in 16 hexadecimal digits."""
    if isinstance(value, Mapping):
        value = to_strict_json(value)
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.sha256(data).hexdigest()[:16]


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row without the metrics that depend on the clock."""
    return digest({key: value for key, value in row.items() if not key.startswith(CLOCK)})


def trajectory_digest(data: Mapping[str, Any]) -> str:
    """Return the digest of a trajectory without the values that depend on the clock."""
    turns = [{k: v for k, v in turn.items() if not k.startswith("seconds_")} for turn in data["turns"]]
    return digest({**data, "turns": turns})
