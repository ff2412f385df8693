"""The reward's verdict: hidden calls are made in a fresh sandbox, and what they give is compared out here.

The expected values never enter a sandbox, and nothing else that graded code does or prints can count as success: to
pass, the right values must come out, and they can only be computed. See README.md for what was tried against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from envs.mini_swe.sources import Files
from mtrl.sandbox.process import ProcessLimits, ProcessSandbox
from mtrl.strict_json import strict_loads

Call = Sequence[Any]
"""`[path, arguments, expected]`: dotted path of a function, a list of JSON values, a JSON value."""

RUNNER = r"""
import json, os, sys
from importlib import import_module
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
for path, arguments in job:
    module, _, name = path.rpartition(".")
    try:
        results.append([plain(getattr(import_module(module), name)(*arguments))])
    except BaseException:
        results.append([])
os.write(answer, json.dumps(results).encode())
os._exit(0)
"""
"""Reads calls without their expected values, writes a list for each: with the value, or empty after an exception. The
standard library comes before the repository on the path, so that no `json.py` there is taken for it."""


def solves(files: Files, calls: Sequence[Call], seconds: float) -> bool:
    """Whether every call gives what is expected.

    Raises:
        SandboxError: the host failed, not the code.
    """
    job = json.dumps([[path, arguments] for path, arguments, _ in calls])
    results = _run(tuple(sorted(files.items())), job, seconds)
    expected = [[value] for _, _, value in calls]
    return bool(calls) and results is not None and _text(results) == _text(expected)


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
