"""Shares of the time of a run, computed from the spans of its timeline."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IDLE = "idle"
WAIT = "wait"
"""Name of spans in which the trainer waits for rollouts."""
OUTSIDE = ("evaluate", "save")
"""Names of spans that are not part of every step."""


@dataclass(frozen=True)
class TimelineSpan:
    step: int
    name: str
    lane: str
    start: float
    """Start of the span, in seconds since the start of the run."""
    end: float
    """End of the span, in seconds since the start of the run."""


@dataclass
class Window:
    """The time from the start of a step to the start of the next."""

    step: int
    start: float
    end: float
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Lane -> activity -> seconds. The seconds of a lane, including IDLE, sum to the length of the window."""
    both: float = 0.0
    """Seconds in which more than one lane was active; waiting does not count."""


def read_spans(raw: Sequence[Mapping[str, Any]]) -> list[TimelineSpan]:
    """Return the spans sorted by start. A span that ends before it starts is left out."""
    spans = [
        TimelineSpan(
            int(s["step"]), str(s.get("name", "?")), str(s.get("lane", "?")), float(s["start"]), float(s["end"])
        )
        for s in raw
    ]
    return sorted((s for s in spans if s.end >= s.start), key=lambda s: (s.start, s.end, s.lane, s.name))


def lanes(spans: Sequence[TimelineSpan]) -> list[str]:
    """Return the lanes: generator, trainer, then others by name."""
    order = {"generator": 0, "trainer": 1}
    return sorted({span.lane for span in spans}, key=lambda lane: (order.get(lane, 2), lane))


def windows(spans: Sequence[TimelineSpan]) -> list[Window]:
    """Cut the run at the first span of every step, and return the activities of the lanes in each window.

    A step that is generated while the previous one is trained begins with its generation, so the window of one step can
    contain the training of another. Where spans of one lane overlap, the time belongs to the span that started later.
    """
    found = [Window(step, start, end) for step, start, end in _cuts(spans)]
    names = lanes(spans)
    number = 0
    for left, right, running in _stretches(spans, [window.start for window in found]):
        while right > found[number].end:
            number += 1
        window = found[number]
        doing = {span.lane: span.name for span in running}
        for lane in names:
            spent = window.seconds.setdefault(lane, defaultdict(float))
            spent[doing.get(lane, IDLE)] += right - left
        window.both += (right - left) * (sum(name != WAIT for name in doing.values()) > 1)
    return [window for window in found if window.seconds]


def shares(some: Sequence[Window], lane: str) -> dict[str, float]:
    """Return the activities of a lane in these windows as shares of their time, which sum to 1."""
    total = sum(window.end - window.start for window in some)
    spent: defaultdict[str, float] = defaultdict(float)
    for window in some:
        for name, seconds in window.seconds.get(lane, {}).items():
            spent[name] += seconds / total
    return dict(spent)


def overlap(some: Sequence[Window]) -> float:
    """Return the share of the time of these windows in which more than one lane was active."""
    total = sum(window.end - window.start for window in some)
    return sum(window.both for window in some) / total if total else 0.0


def middle_steps(spans: Sequence[TimelineSpan]) -> list[int]:
    """Return at most three consecutive steps from the middle of the run, after its warm-up."""
    steps = sorted({span.step for span in spans if span.name not in OUTSIDE})
    first = max(0, (len(steps) - 3) // 2)
    return steps[first : first + 3]


def _cuts(spans: Sequence[TimelineSpan]) -> list[tuple[int, float, float]]:
    """Return intervals `(step, start, end)` that partition the time of the run."""
    starts: dict[int, float] = {}
    for span in spans:
        starts[span.step] = min(starts.get(span.step, span.start), span.start)
    order = sorted(starts, key=lambda step: (starts[step], step))
    if not order:
        return []
    ends = [starts[step] for step in order[1:]] + [max(span.end for span in spans)]
    return [(step, starts[step], end) for step, end in zip(order, ends, strict=True)]


def _stretches(
    spans: Sequence[TimelineSpan], cuts: Sequence[float]
) -> Iterator[tuple[float, float, list[TimelineSpan]]]:
    """Yield `(left, right, running spans by start)` between each two consecutive starts, ends and cuts."""
    edges = sorted({*cuts, *(moment for span in spans for moment in (span.start, span.end))})
    running: list[TimelineSpan] = []
    waiting = iter([*spans, None])
    coming = next(waiting)
    for left, right in itertools.pairwise(edges):
        running = [span for span in running if span.end > left]
        while coming is not None and coming.start <= left:
            if coming.end > left:
                running.append(coming)
            coming = next(waiting)
        yield left, right, running
