"""The verdict about an episode: the task's own tests run in its container, and leave a reward file.

The protocol is that of `harbor.verifier.verifier` (Harbor 0.26): the folder tests is copied to /tests, /tests/test.sh
runs in the working directory, and it writes /logs/verifier/reward.json or /logs/verifier/reward.txt.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from envs.terminal.task import TerminalTask
from mtrl.sandbox.container import Container, ContainerRemovedError, CopyRefusedError, copy_out

REWARD_FILES = ("reward.json", "reward.txt")
"""Names of the reward file; the first that exists counts."""
LOG_CHARACTERS = 20_000
"""Maximum length of the tests' output in the report, in characters; the end of the output is kept."""
MAKE_FOLDERS = (
    "chmod -R u+rwx /tests /logs/verifier 2> /dev/null; rm -rf /tests /logs/verifier 2> /dev/null; "
    'mkdir -p /tests /logs/verifier && left=$(ls -A /tests && ls -A /logs/verifier) && [ -z "$left" ] || '
    "{ echo 'the folders /tests and /logs/verifier cannot be emptied'; exit 1; }"
)
"""Command that empties the folders of the tests and of their results, and fails if a file is left. `rm` removes nothing
from a folder that its user may not write to, so an agent could keep a reward file. The folders of bubblewrap cannot be
removed themselves, so the result of the removal is ignored."""
_PREPARE_SECONDS = 30.0


@dataclass(frozen=True)
class Verdict:
    """The result of the tests."""

    reward: float
    """Reward from the reward file; 0.0 if the tests left no readable one."""
    is_readable: bool
    """Whether the tests left a reward file that holds a finite reward."""
    report: str
    """JSON object with `exit_code` and `output` of the tests, and `file` and `text` of the reward file."""


def run_tests(container: Container, task: TerminalTask) -> Verdict:
    """Copy the tests into the container, run them, and read the reward.

    The container is the agent's, so the agent may have made tests impossible; the reward is then 0.

    Raises:
        ContainerError: the backend failed.
    """
    prepared = container.run(MAKE_FOLDERS, _PREPARE_SECONDS)
    if prepared.exit_code != 0:
        return _verdict(prepared.exit_code, prepared.output, None, None)
    try:
        container.copy_in(task.folder / "tests", "/tests")
    except (ContainerRemovedError, CopyRefusedError) as error:
        return _verdict(-1, str(error), None, None)
    command = "chmod +x /tests/test.sh && /tests/test.sh"
    done = container.run(command, task.tests_seconds, {**task.env, **task.tests_env})
    output = f"{done.output}\nthe tests were stopped: {done.stopped}" if done.stopped else done.output
    for file in REWARD_FILES:
        if (text := copy_out(container, f"/logs/verifier/{file}")) is not None:
            return _verdict(done.exit_code, output, file, text)
    return _verdict(done.exit_code, output, None, None)


def _verdict(exit_code: int, output: str, file: str | None, text: str | None) -> Verdict:
    reward = None if file is None or text is None else parse_reward(file, text)
    report = {"exit_code": exit_code, "file": file, "text": text, "output": output[-LOG_CHARACTERS:]}
    return Verdict(reward or 0.0, reward is not None, json.dumps(report, ensure_ascii=False))


def parse_reward(file: str, text: str) -> float | None:
    """Return the reward of a reward file, or None if it holds no finite number.

    A reward.json is a number, or an object whose key `reward` counts, or whose only key.
    """
    try:
        value = json.loads(text) if file == "reward.json" else _number(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _number(text: str) -> float:
    """Return the number of a text. `float` alone accepts underscores and the digits of other scripts too, which no
    test writes."""
    if "_" in text or not text.strip().isascii():
        raise ValueError(f"{text!r} is no plain number")
    return float(text)
