"""The reward's verdict: hidden calls run in a fresh sandbox, and their results are compared outside of it.

The expected values never enter a sandbox, so graded code can only pass if it computes the right values; no other action
or output can count as success. README.md lists the attacks that were tried.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from envs.mini_swe.calls import Call
from envs.mini_swe.sources import Files
from mtrl.sandbox.process import ProcessLimits, ProcessSandbox
from mtrl.utils.strict_json import strict_loads

RUNNER = r"""
import json, os, sys
from importlib import import_module
from itertools import islice
job = json.load(sys.stdin)
answer, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(sink, 1), os.dup2(sink, 2)
sys.path.append("/workspace")
def plain(value):
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError
results = []
for path, arguments, items in job:
    module, _, name = path.rpartition(".")
    try:
        value = getattr(import_module(module), name)(*arguments)
        results.append([plain(value if items is None else list(islice(value, items)))])
    except BaseException:
        results.append([])
os.write(answer, json.dumps(results).encode())
os._exit(0)
"""
"""Program in the sandbox. It reads calls without their expected values, and writes a list for each call: with the
value, or empty after an exception. The standard library precedes the repository on the path, so that a `json.py` there
does not replace it."""


LONGER = 8
"""Number of times that the results may be as long as the expected ones, as JSON: a float with all its digits, which a
tolerance accepts, is longer than the rounded one of a row."""


def solves(files: Files, calls: Sequence[Sequence[Any]], seconds: float) -> bool:
    """Whether every call gives the expected result.

    Args:
        calls: the calls of a row, see `Call`. A call with its own time limit runs in its own process, because graded
            code could manipulate a timer in its process.
        seconds: time limit of all other calls together.

    Raises:
        SandboxError: the host failed, not the graded code.
    """
    held = tuple(sorted(files.items()))
    made = [Call.of(call) for call in calls]
    groups = [([call for call in made if call.seconds is None], seconds)]
    groups += [([call], call.seconds) for call in made if call.seconds is not None]
    return bool(made) and all(_all_right(held, group, limit) for group, limit in groups if group)


def _all_right(files: tuple[tuple[str, bytes], ...], calls: Sequence[Call], seconds: float) -> bool:
    expected = json.dumps([call.expected for call in calls])
    most_bytes = max(ProcessLimits.output_bytes, LONGER * len(expected))
    job = json.dumps([[call.path, call.arguments, call.items] for call in calls])
    results = run_job(files, job, seconds, most_bytes)
    if not isinstance(results, list) or len(results) != len(calls):
        return False
    return all(_is_right(result, call) for result, call in zip(results, calls, strict=True))


def _is_right(result: Any, call: Call) -> bool:
    if call.tolerance is None:
        return _text(result) == _text([call.expected])
    return isinstance(result, list) and len(result) == 1 and _is_near(result[0], call.expected, call.tolerance)


def _is_near(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether the values are equal up to `tolerance`. The tolerance applies to numbers where a float is expected; it is
    relative if the expected number is above 1 in magnitude, else absolute."""
    if isinstance(expected, float) and type(value) in (int, float):
        slack = tolerance * max(1.0, abs(expected))
        return expected - slack <= value <= expected + slack  # no subtraction: an int may be too large for a float
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        return all(_is_near(*pair, tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        return all(_is_near(value[key], expected[key], tolerance) for key in expected)
    return _text(value) == _text(expected)


@lru_cache(maxsize=512)
def run_job(files: tuple[tuple[str, bytes], ...], job: str, seconds: float, most_bytes: int) -> Any:
    """Return the results of a job, or None, such as if they take more than `most_bytes` bytes as JSON. They depend only
    on the arguments and are cached, because trajectories of a row often leave the same files."""
    limits = ProcessLimits(
        seconds=seconds,
        cpu_seconds=max(1, int(seconds)),
        processes=32,
        output_bytes=most_bytes,
        printed_bytes=max(ProcessLimits.printed_bytes, most_bytes),
    )
    with ProcessSandbox(limits) as sandbox:
        try:
            for path, content in files:
                sandbox.write_file(path, content)
        except OSError:  # a file has the path of a folder
            return None
        # -I and -S: no environment variables, no site module, no user packages.
        done = sandbox.run(["python3", "-I", "-S", "-c", RUNNER], stdin=job)
    if done.exit_code or done.killed_by or done.truncated:
        return None
    try:
        return strict_loads(done.stdout)
    except ValueError:
        return None


def _text(value: Any) -> str:
    """Return a text that is equal only for equal values of equal types: True differs from 1, and 1 from 1.0."""
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return ""
