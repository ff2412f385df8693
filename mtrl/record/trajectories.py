"""Files of trajectories, each with an index beside it that summarises the lines.

`NAME.jsonl` holds one `Trajectory` per line. `NAME.index.json` holds one `LineSummary` per line, and a stamp of the
file that it was made from. A missing, outdated or broken index is not an error: `scan` rebuilds it from the file.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import sub
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtrl.record.reading import read
from mtrl.record.trajectory_json import trajectory_line
from mtrl.types import Group, to_dict
from mtrl.utils.files import replace_file

FORMAT = 1
"""Version of the index format. An index with another version is rebuilt."""
LONGEST_LINE = 64 * 2**20
"""Maximum length of a line, in bytes. A longer line is not read; its summary reports the `problem`."""
LARGEST_INDEX = 512 * 2**20
"""Maximum size of an index, in bytes. A larger one is rebuilt."""
TAIL = 4096
"""Number of bytes at the end of a file that go into its stamp."""
MOST_REWARDS = 64
MOST_NAMES = 64
LONGEST_TEXT = 500
"""Maximum length of an id or an error in a summary, in characters."""

_STEP = re.compile(r"(.+)_step_(\d{1,15})")
_NUMBER = (int, float, type(None))


class LineSummary(NamedTuple):
    """Summary of one trajectory, as lists show it. Numbers that are not finite are None."""

    offset: int
    """Number of bytes before the line."""
    length: int
    """Length of the line in bytes, line end included."""
    task_id: str
    group_id: str
    place: int
    """Index of the trajectory within its group."""
    reward: float | None
    score: float | None
    stop_reason: str
    turns: int
    tokens: int
    """Number of sampled tokens."""
    longest_turn: int
    """Number of sampled tokens of the longest turn."""
    cut_turns: int
    context: int
    """Number of tokens of the whole conversation at its end."""
    oldest_version: int | None
    newest_version: int | None
    advantage: float | None
    """Mean advantage over the sampled tokens; None if no turn has advantages."""
    informative: bool | None
    """Whether any advantage is not 0; None if no turn has advantages."""
    drift: float | None
    """Largest |trainer's log-prob - sampler's| of a token; None if the trainer computed no log-probs."""
    components: dict[str, float]
    """Sum of each reward component over the turns."""
    rewards: list[float | None]
    """Rewards of the first turns, at most `MOST_REWARDS`."""
    trainable: bool
    seconds: float | None
    """Seconds of generation and environment together."""
    error: str | None
    """Last line of the trajectory's error."""
    problem: str | None
    """Reason why the line is not a trajectory; then all fields but `offset` and `length` are empty."""


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("offset", "length", "place", "turns", "tokens", "longest_turn", "cut_turns", "context"), (int,)),
    **dict.fromkeys(("task_id", "group_id", "stop_reason"), (str,)),
    **dict.fromkeys(("reward", "score", "advantage", "drift", "seconds"), _NUMBER),
    **dict.fromkeys(("oldest_version", "newest_version"), (int, type(None))),
    **dict.fromkeys(("error", "problem"), (str, type(None))),
    "informative": (bool, type(None)),
    "trainable": (bool,),
    "components": (dict,),
    "rewards": (list,),
}


class Stamp(NamedTuple):
    """Identifies the state of a file that was indexed."""

    size: int
    modified: int
    """Time of the last modification in whole seconds, which every copy and archive preserves."""
    tail: int
    """CRC-32 of the last `TAIL` bytes of the file."""


@dataclass
class TrajectoryIndex:
    """Summaries of the lines of a file up to `stamp.size` bytes, without a half-written last line."""

    stamp: Stamp
    lines: list[LineSummary] = field(default_factory=list)


def write_groups(folder: Path, kind: str, step: int, groups: Iterable[Group]) -> Path:
    """Write the trajectories of `groups` to `<kind>_step_<NNNNNN>.jsonl`, whole or not at all, and then the index.

    Returns:
        The path of the file of trajectories.
    """
    path = Path(folder) / f"{kind}_step_{step:06d}.jsonl"
    lines: list[LineSummary] = []

    def write(part: Path) -> None:
        offset = 0
        with part.open("wb") as file:
            for group in groups:
                for trajectory in group.trajectories:
                    data = to_dict(trajectory)
                    for turn in data["turns"]:
                        turn.pop("experts", None)  # which would be longer than all the rest
                    line = _encoded(data)
                    file.write(line)
                    lines.append(summarise(data, offset, len(line)))
                    offset += len(line)

    replace_file(path, write)
    write_index(path, TrajectoryIndex(stamp_of(path), lines))
    return path


def remove_later(folder: Path, step: int) -> None:
    """Remove the files of later steps than `step`, which a resumed run makes again, and their indexes."""
    for path in folder.glob("*.jsonl"):
        if (own := kind_and_step(path)[1]) is not None and own > step:
            index_path(path).unlink(missing_ok=True)
            path.unlink()


def kind_and_step(path: Path) -> tuple[str, int | None]:
    """Return the kind and the step of a file name: `train_step_000010.jsonl` is (train, 10). Other names are kinds
    without a step."""
    name = path.name.removesuffix(".jsonl")
    found = _STEP.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


def index_path(path: Path) -> Path:
    """Return the path of the index of a file of trajectories. It does not end in `.jsonl`, because programs take every
    `*.jsonl` for trajectories."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".index.json")


def stamp_of(path: Path, size: int | None = None) -> Stamp:
    """Return the stamp of a file, or of its first `size` bytes.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        size = found.st_size if size is None else size
        file.seek(max(0, size - TAIL))
        return Stamp(size, int(found.st_mtime), zlib.crc32(file.read(min(size, TAIL))))


def write_index(path: Path, index: TrajectoryIndex) -> None:
    """Write the index of the file `path` beside it, whole or not at all.

    Raises:
        OSError: The folder cannot be written.
    """
    content = {"format": FORMAT, "stamp": index.stamp, "fields": LineSummary._fields, "lines": index.lines}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    target = index_path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")  # a run and a viewer may write it at the same time
    try:
        part.write_text(text, encoding="ascii")
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def read_index(path: Path) -> TrajectoryIndex | None:
    """Return the stored index of the file `path`, which may describe an older state of the file; None if there is no
    usable index. An index that is a pipe, or a link out of the folder, is not read.

    To check the index, compare its stamp with `stamp_of`, or use `continues` if the file may have grown since.
    """
    try:
        content = json.loads(read(index_path(path), path.parent, LARGEST_INDEX))
        if content["format"] != FORMAT or content["fields"] != list(LineSummary._fields):
            return None
        lines = [LineSummary._make(row) for row in content["lines"]]
        stamp = Stamp(*map(int, content["stamp"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    for name, column in zip(LineSummary._fields, zip(*lines, strict=True), strict=False):  # no columns without lines
        if not set(map(type, column)) <= set(_TYPES[name]):
            return None
    ends = [0, *(line.offset + line.length for line in lines)]
    in_order = all(end <= line.offset and line.length > 0 for end, line in zip(ends, lines, strict=False))
    return TrajectoryIndex(stamp, lines) if in_order and ends[-1] <= stamp.size else None


def is_fresh(index: TrajectoryIndex, path: Path) -> bool:
    """Whether the file is unchanged since it was indexed."""
    return index.stamp == stamp_of(path)


def continues(index: TrajectoryIndex, path: Path) -> bool:
    """Whether the file has only been appended to since it was indexed, as judged by the last bytes of the indexed
    part."""
    size = index.stamp.size
    return path.stat().st_size >= size and stamp_of(path, size).tail == index.stamp.tail


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines up to the first one without a line end. Bytes appended meanwhile belong to that line."""
    return takewhile(lambda line: line.endswith(b"\n"), file)


def scan(path: Path, offset: int = 0) -> Iterator[LineSummary]:
    """Yield summaries of the lines from byte `offset` on, without empty lines. A line that is not a trajectory has a
    `problem`.

    A last line without a line end counts if it is a whole trajectory; otherwise a process is still writing it.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while line := file.readline(LONGEST_LINE):
            start, offset = offset, offset + len(line)
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                offset += _skip_line(file)
                yield _unreadable(start, offset - start, f"longer than {LONGEST_LINE // 2**20} MiB")
                continue
            is_whole = line.endswith(b"\n")
            if line.strip():
                summary = summarise_line(line, start)
                if summary.problem is None or is_whole:
                    yield summary
            if not is_whole:
                return  # bytes appended meanwhile belong to this line


def summarise_line(line: bytes, offset: int) -> LineSummary:
    """Return the summary of one line of a file, which may hold anything."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _unreadable(offset, len(line), f"not JSON: {next(iter(str(error).splitlines()), '')}")
    return summarise(data, offset, len(line))


def summarise(data: Mapping[str, Any], offset: int, length: int) -> LineSummary:
    """Return the summary of a trajectory in the form that `to_dict` or JSON gives."""
    try:
        return _summary(data, offset, length)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return _unreadable(
            offset, length, f"no trajectory: {type(error).__name__} {next(iter(str(error).splitlines()), '')}"
        )


def _summary(data: Mapping[str, Any], offset: int, length: int) -> LineSummary:
    turns = data["turns"]
    lengths = [len(turn["action_ids"]) for turn in turns]
    rewards = [_finite(turn["reward"]) for turn in turns]
    versions = [int(version) for turn in turns for version, _ in turn["version_spans"]]
    advantage, informative = _credit(turns)
    error = data.get("error")
    return LineSummary(
        offset=offset,
        length=length,
        task_id=_text(data["task_id"]),
        group_id=_text(data["group_id"]),
        place=int(data["index"]),
        reward=None if None in rewards else _finite(sum(float(turn["reward"]) for turn in turns)),
        score=_finite(data.get("score")),
        stop_reason=_text(data["stop_reason"]),
        turns=len(turns),
        tokens=sum(lengths),
        longest_turn=max(lengths, default=0),
        cut_turns=sum(turn["finish"] == "length" for turn in turns),
        context=_context(turns),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        advantage=advantage,
        informative=informative,
        drift=_drift(turns),
        components=_sums(turns),
        rewards=rewards[:MOST_REWARDS],
        trainable=bool(data.get("trainable", True)),
        seconds=_finite(sum(turn.get("seconds_generate", 0) + turn.get("seconds_environment", 0) for turn in turns)),
        error=_text(error.strip().rpartition("\n")[2]) if isinstance(error, str) and error.strip() else None,
        problem=None,
    )


def _credit(turns: list[Mapping[str, Any]]) -> tuple[float | None, bool | None]:
    """Return the mean advantage of the sampled tokens, and whether any advantage is not 0."""
    total, tokens, informative = 0.0, 0, False
    for turn in turns:
        if advantages := turn.get("advantages"):
            count = len(turn["action_ids"])
            share = count if len(advantages) == 1 else 1  # a single number applies to all tokens of the turn
            total += share * math.fsum(advantages)
            tokens += count
            informative = informative or any(advantages)
    return (_finite(total / tokens), informative) if tokens else (None, None)


def _drift(turns: list[Mapping[str, Any]]) -> float | None:
    """Return the largest absolute difference between the two log-probs of a token."""
    largest = None
    for turn in turns:
        if trainer := turn.get("trainer_logprobs"):
            found = max(map(abs, map(sub, trainer, turn["action_logprobs"])), default=0.0)
            largest = found if largest is None or not found <= largest else largest
    return _finite(largest)


def _context(turns: list[Mapping[str, Any]]) -> int:
    """Return `Trajectory.context_tokens` of parsed JSON, without building a `Trajectory`."""
    ends = [0]
    """Number of context tokens after each turn; the first entry, 0, is before any turn."""
    for turn in turns:
        parent = turn.get("parent")
        before = ends[-1 if parent is None else parent + 1]
        whole = turn.get("break_reason") is not None  # then the observation is the whole context
        ends.append((0 if whole else before) + len(turn["observation_ids"]) + len(turn["action_ids"]))
    return ends[-1]


def _sums(turns: list[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.get("components", {}).items():
            if name in sums or len(sums) < MOST_NAMES:
                sums[name] = sums.get(name, 0.0) + float(value)
    return {_text(name): value for name, value in sums.items() if math.isfinite(value)}


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _text(value: Any) -> str:
    return str(value)[:LONGEST_TEXT]


def _unreadable(offset: int, length: int, problem: str) -> LineSummary:
    return LineSummary(
        offset, length, "", "", 0, None, None, "", 0, 0, 0, 0, 0, None, None, None, None, None, {}, [], False, None,
        None, problem[:LONGEST_TEXT],
    )  # fmt: skip


def _encoded(data: dict[str, Any]) -> bytes:
    """Return one line of the file. Text that UTF-8 cannot hold (half of a surrogate pair) is written as `\\u` escapes,
    without loss."""
    try:
        return (trajectory_line(data) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(data) + "\n").encode()


def _skip_line(file: IO[bytes]) -> int:
    """Read to the end of the line, and return the number of bytes read."""
    skipped = 0
    while part := file.readline(2**20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped
