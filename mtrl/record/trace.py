"""A trace of one training step: every operation of every thread beside the spans of the timeline."""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrl.record.timeline import Timeline, rows
from mtrl.utils.files import replace_file, replace_text

SECONDS = 5.0
"""Seconds of each timeline span that are recorded, from its start. Small models run about 100,000 operations per
second, and trace viewers open only some millions."""
COSTLIEST = 40
"""Maximum number of operations in the table."""
Event = dict[str, Any]
"""One event of the Chrome trace format (Trace Event Format, Google, 2016): `ph`, `name`, `pid`, `tid`, and `ts` and
`dur` in microseconds."""


@contextmanager
def step_trace(path: Path, timeline: Timeline, seconds: float = SECONDS) -> Iterator[None]:
    """Record the operations of all threads inside the block into `path` (`….json.gz`), which ui.perfetto.dev and
    chrome://tracing open. A table of the costliest operations is written beside it (`….txt`).

    The spans of the timeline appear as a separate process, `timeline`. A span longer than `seconds` has operations only
    at its start. Recording slows down operations of microseconds, and writing takes seconds, so a traced step does not
    measure speed. Nothing is written if the block fails.
    """
    start = timeline.seconds
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), seconds)
        timeline.on_begin, before = recorder.go_on, timeline.on_begin
        recorder.go_on()
        try:
            yield
        finally:
            timeline.on_begin = before
            recorder.pause()
        events, base = recorder.read()
    spans = timeline.spans(since=start)
    zero = (time.time() - timeline.seconds) * 1e6 - base
    trace = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base * 1e3, "traceEvents": [*_lanes(spans, zero), *events]}
    replace_file(path, lambda part: part.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=5)))
    replace_text(path.with_name(path.name.removesuffix(".gz").removesuffix(".json") + ".txt"), table(spans, events))


class Recorder:
    """Runs torch.profiler for limited periods; each period is exported to a file in `folder`."""

    def __init__(self, folder: Path, seconds: float):
        self.folder, self.seconds = folder, seconds
        self._lock = threading.RLock()
        self._profiler: Any = None
        self._timer: threading.Timer | None = None
        self._pieces: list[Path] = []

    def go_on(self) -> None:
        """Record for `seconds` from now."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._profiler is None:
                self._profiler = _profiler()
                self._profiler.start()
            self._timer = threading.Timer(self.seconds, self.pause)
            self._timer.daemon = True
            self._timer.start()

    def pause(self) -> None:
        """Stop recording until the next call of `go_on`."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._profiler is not None:
                self._profiler.stop()
                self._pieces.append(self.folder / f"{len(self._pieces)}.json")
                self._profiler.export_chrome_trace(str(self._pieces[-1]))
                self._profiler = None

    @property
    def recording(self) -> bool:
        with self._lock:
            return self._profiler is not None

    def read(self) -> tuple[list[Event], float]:
        """Return all events, without the arguments of CPU operations, and the zero of their times in microseconds since
        1970."""
        events: list[Event] = []
        bases: list[float] = []
        for piece in self._pieces:
            trace = json.loads(piece.read_bytes())
            bases.append(trace["baseTimeNanoseconds"] / 1e3)
            for event in trace["traceEvents"]:
                if event.get("cat") == "cpu_op":
                    event.pop("args", None)  # rarely read, and half of the file
                if "ts" in event:
                    event["ts"] += bases[-1] - bases[0]
                events.append(event)
        return events, bases[0]


def _profiler() -> Any:
    """Return a profiler of all threads, because the update runs in a separate thread. It records no shapes or stacks,
    which would multiply the size of the events."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, experimental_config=settings)


def _lanes(spans: Sequence[dict[str, Any]], zero: float) -> Iterator[Event]:
    """Yield the spans as trace events, with overlapping spans in separate rows. `zero` is the start of the timeline, in
    microseconds."""
    process = {"ph": "M", "pid": "timeline", "tid": 0}
    yield {**process, "name": "process_name", "args": {"name": "timeline"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": -1}}
    for lane in sorted({span["lane"] for span in spans}):
        chosen = sorted((span for span in spans if span["lane"] == lane), key=lambda span: span["start"])
        for span, row in zip(chosen, rows([(s["start"], s["end"]) for s in chosen]), strict=True):
            thread = lane if not row else f"{lane} {row + 1}"
            at = {"ts": zero + span["start"] * 1e6, "dur": (span["end"] - span["start"]) * 1e6}
            yield {"ph": "X", "cat": "timeline", "name": span["name"], "pid": "timeline", "tid": thread, **at}


@dataclass
class Cost:
    calls: int = 0
    own: float = 0.0
    """Microseconds in the operation, without those of the operations that it called."""
    total: float = 0.0


def costs(events: Sequence[Event]) -> dict[tuple[str, str], Cost]:
    """Return `(category, name)` -> cost over all calls. An operation that calls itself counts twice in `total`.

    It replaces torch's `key_averages`, which takes half a minute for 200,000 events.
    """
    timed = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "kernel", "gpu_memcpy")]
    timed.sort(key=lambda e: (str(e["pid"]), str(e["tid"]), e["ts"], -e["dur"]))
    found: defaultdict[tuple[str, str], Cost] = defaultdict(Cost)
    around: list[tuple[Any, float, Cost]] = []  # thread, end and cost of the enclosing operations
    for event in timed:
        thread, end = (event["pid"], event["tid"]), event["ts"] + event["dur"]
        while around and (around[-1][0] != thread or around[-1][1] <= event["ts"]):
            around.pop()
        if around:
            around[-1][2].own -= event["dur"]
        cost = found[event["cat"], event["name"]]
        cost.calls, cost.own, cost.total = cost.calls + 1, cost.own + event["dur"], cost.total + event["dur"]
        around.append((thread, end, cost))
    return dict(found)


def table(spans: Sequence[dict[str, Any]], events: Sequence[Event]) -> str:
    """Return a text table of durations: the spans of the timeline, then the costliest operations."""
    found = sorted(costs(events).items(), key=lambda item: -item[1].own)
    whole = sum(cost.own for _, cost in found) or 1.0
    lines = [f"{'span':<24}{'lane':<12}{'start s':>10}{'end s':>10}"]
    lines += [f"{s['name']:<24}{s['lane']:<12}{s['start']:>10.3f}{s['end']:>10.3f}" for s in spans]
    lines += ["", f"{'own ms':>10}{'share':>8}{'total ms':>11}{'calls':>9}  operation"]
    for (kind, name), cost in found[:COSTLIEST]:
        label = name if kind == "cpu_op" else f"{name} ({kind})"
        lines.append(
            f"{cost.own / 1e3:>10.2f}{cost.own / whole:>8.1%}{cost.total / 1e3:>11.2f}{cost.calls:>9}  {label}"
        )
    return "\n".join([*lines, "", f"{sum(cost.calls for _, cost in found)} operations, {whole / 1e3:.1f} ms"]) + "\n"
