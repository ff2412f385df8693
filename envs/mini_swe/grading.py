"""The reward's verdict: hidden calls are made in a fresh sandbox, and what they give is compared out here.

The expected values never enter a sandbox, and nothing else that graded code does or prints can count as success: to
pass, the right values must come out, and they can only be computed. See README.md for what was tried against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from envs.mini_swe.calls import Call
from envs.mini_swe.sources import Files
from mtrl.sandbox.process import ProcessLimits, ProcessSandbox
from mtrl.strict_json import strict_loads

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
"""Reads calls without their expected values, writes a list for each: with the value, or empty after an exception. The
standard library comes before the repository on the path, so that no `json.py` there is taken for it."""


def solves(files: Files, calls: Sequence[Sequence[Any]], seconds: float) -> bool:
    """Whether every call gives what is expected.

    Args:
        calls: as a row has them, see `Call`. One with a time limit of its own is made in a process of its own, for
            code may do to a timer in its process what it likes.
        seconds: for all the others together.

    Raises:
        SandboxError: the host failed, not the code.
    """
    held = tuple(sorted(files.items()))
    made = [Call.of(call) for call in calls]
    groups = [([call for call in made if call.seconds is None], seconds)]
    groups += [([call], call.seconds) for call in made if call.seconds is not None]
    return bool(made) and all(_all_right(held, group, limit) for group, limit in groups if group)


def _all_right(files: tuple[tuple[str, bytes], ...], calls: Sequence[Call], seconds: float) -> bool:
    results = _run(files, json.dumps([[call.path, call.arguments, call.items] for call in calls]), seconds)
    if not isinstance(results, list) or len(results) != len(calls):
        return False
    return all(_is_right(result, call) for result, call in zip(results, calls, strict=True))


def _is_right(result: Any, call: Call) -> bool:
    if call.tolerance is None:
        return _text(result) == _text([call.expected])
    return isinstance(result, list) and len(result) == 1 and _is_near(result[0], call.expected, call.tolerance)


def _is_near(value: Any, expected: Any, tolerance: float) -> bool:
    """Equal, but that a number may be off by `tolerance`, times the expected number where that is above 1, if that
    number is a float."""
    if isinstance(expected, float) and type(value) in (int, float):
        slack = tolerance * max(1.0, abs(expected))
        return expected - slack <= value <= expected + slack  # no difference: an int may be too large for a float
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        return all(_is_near(*pair, tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict) and isinstance(value, dict) and value.keys() == expected.keys():
        return all(_is_near(value[key], expected[key], tolerance) for key in expected)
    return _text(value) == _text(expected)


@lru_cache(maxsize=512)
def _run(files: tuple[tuple[str, bytes], ...], job: str, seconds: float) -> Any:
    """The results of a job, or None. Kept, for they are a function of the files: samples of a row repeat each other."""
    limits = ProcessLimits(seconds=seconds, cpu_seconds=max(1, int(seconds)), processes=32)
    with ProcessSandbox(limits) as sandbox:
        try:
            for path, content in files:
                sandbox.write_file(path, content)
        except OSError:  # a file where a folder should be
            return None
        # -I and -S: no settings of the environment, no site, no user's packages.
        done = sandbox.run(["python3", "-I", "-S", "-c", RUNNER], stdin=job)
    if done.exit_code or done.killed_by or done.truncated:
        return None
    try:
        return strict_loads(done.stdout)
    except ValueError:
        return None


def _text(value: Any) -> str:
    """Equal for equal values of equal types: True is not 1, and 1 is not 1.0."""
    try:
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return ""
