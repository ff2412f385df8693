"""The scorer, independent of the reward: this module shares no code with the environment or `grading.py`.

The commands of the trajectory run again in a new sandbox, and the scorer's own driver makes the hidden calls. For an
episode in a container, the scorer evaluates the log of the tests in the last message instead, because a replay would
take as long as the episode.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Any

from mtrl.sandbox.process import ProcessLimits, ProcessSandbox
from mtrl.types import Row, StopReason, Trajectory

SUBMISSION = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SECONDS = (30.0, 30.0)
"""Default time limits of one command and of the hidden calls, in seconds, if the row has none."""
PYTHON_SOURCE = re.compile(r"(?!.*(?:^|/)(?:\.|tests?/|testing/|__pycache__/))(?:.+/)?([^/]+\.py)", re.DOTALL)
RUNS_UNASKED = re.compile(
    r"test_.*|.*_test\.py|(?:conftest|sitecustomize|usercustomize|setup|noxfile)\.py", re.IGNORECASE | re.DOTALL
)
DRIVER = """
import os, sys
calls = eval(sys.stdin.read(), {})
out = os.fdopen(os.dup(1), "w")
os.close(1), os.close(2)
for _ in (1, 2):
    os.open("/dev/null", os.O_WRONLY)
sys.path += ["/workspace"]
import importlib
def builtin(value):
    kind = type(value)
    if kind is tuple or kind is list:
        return list(map(builtin, value))
    if kind is dict:
        if any(type(name) is not str for name in value):
            raise ValueError
        return {name: builtin(value[name]) for name in sorted(value)}
    if kind not in (int, str, float, bool, type(None)):
        raise ValueError
    return value
for function, arguments, most in calls:
    try:
        *module, name = function.split(".")
        value = vars(importlib.import_module(".".join(module)))[name](*arguments)
        if most is not None:
            value = [item for _, item in zip(range(most), value)]
        out.write("value " + ascii(builtin(value)) + chr(10))
    except BaseException as error:
        out.write("nothing " + ascii(type(error).__name__) + chr(10))
out.flush()
os._exit(0)
"""


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the trajectory's commands repair the row's repository, else 0.0."""
    return float(explain(trajectory, row) is None)


def explain(trajectory: Trajectory, row: Row) -> str | None:
    """Return the reason why the trajectory is no success; None if it is one."""
    truth = row["ground_truth"]
    if "image" in truth:
        return None if _log_says_resolved(trajectory, truth) else "by their log, the tests do not pass"
    files = tuple(sorted(truth["files"].items()))
    commands = tuple(filter(None, (command_of(message) for message in trajectory.messages)))
    for_command, for_calls = truth.get("seconds", SECONDS)
    submitted, left = replay(files, commands, for_command)
    if not submitted and trajectory.stop_reason != StopReason.MAX_TURNS:
        return "nothing was submitted"  # the episode ended before the last turn
    if left is None or sorted(left) == [(path, text.encode()) for path, text in files]:
        return "no source file was changed"
    return _first_failure(left, truth["calls"], for_calls)


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message holds the command that submits, and the environment accepted it."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    command = command_of(responses[-1]) if responses else None
    return trajectory.stop_reason == StopReason.DONE and command is not None and SUBMISSION in command


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`, the share of the assistant's messages that hold one command, and `asks_to_submit`, which is 1.0
    if a command contains the marker of a submission, else 0.0."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    commands = [command_of(message) for message in responses]
    return {
        "format": sum(command is not None for command in commands) / max(len(responses), 1),
        "asks_to_submit": float(any(SUBMISSION in command for command in commands if command)),
    }


def command_of(message: dict[str, Any]) -> str | None:
    """Return the command of an assistant's message with exactly one bash block; else None."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return None
    lines = content.split("</think>")[-1].split("\n")
    openings = [n for n, line in enumerate(lines) if line.rstrip(" \t\r") in ("```bash", "```mswea_bash_command")]
    if len(openings) != 1:
        return None
    after = lines[openings[0] + 1 :]
    closing = next((n for n, line in enumerate(after) if line.startswith("```")), None)
    if closing is None:
        return None
    return "\n".join(after[:closing]).strip() or None


@lru_cache(maxsize=512)
def replay(
    files: tuple[tuple[str, str], ...], commands: tuple[str, ...], seconds: float
) -> tuple[bool, tuple[tuple[str, bytes], ...] | None]:
    """Return whether the commands submit, and the files after them; None instead of the files if they cannot be
    read."""
    if not commands:
        return False, tuple((path, text.encode()) for path, text in files)
    submitted = False
    limits = ProcessLimits(seconds=seconds, cpu_seconds=max(1, int(seconds)), output_bytes=2**20)
    with ProcessSandbox(limits) as sandbox:
        for path, text in files:
            sandbox.write_file(path, text)
        for command in commands:
            done = sandbox.run(["bash", "-c", "exec 2>&1; " + command])
            printed = (done.stdout + done.stderr).lstrip().splitlines() or [""]
            if done.exit_code == 0 and not done.killed_by and printed[0].strip() == SUBMISSION:
                submitted = True
                break
        try:
            found = sandbox.snapshot()
        except OSError:
            return submitted, None
    left = [(path, text.encode()) for path, text in files if not is_editable(path)]
    left += [(path, content) for path, content in found.items() if content is not None and is_editable(path)]
    if sum(len(content) for _, content in left) - sum(len(text.encode()) for _, text in files) > 2**20:
        return submitted, None
    return submitted, tuple(left)


def is_editable(path: str) -> bool:
    """Whether a changed or new file of this path is graded."""
    named = PYTHON_SOURCE.fullmatch(path)
    return named is not None and RUNS_UNASKED.fullmatch(named[1]) is None


def _first_failure(files: tuple[tuple[str, bytes], ...], calls: list[Any], seconds: float) -> str | None:
    """Return a description of the first call with a wrong result; None if all results are right."""
    together = [(call, {}) for call in calls if len(call) == 3]
    together += [(call[:3], call[3]) for call in calls if len(call) == 4 and "seconds" not in call[3]]
    alone = [(call[:3], call[3]) for call in calls if len(call) == 4 and "seconds" in call[3]]
    for group, limit in [(together, seconds), *(([call], call[1]["seconds"]) for call in alone)]:
        length = sum(len(ascii(wanted)) for (_, _, wanted), _ in group)
        given_calls = repr([(f, given, options.get("items")) for (f, given, _), options in group])
        outputs = drive(files, given_calls, limit, max(2**16, 8 * length))
        if len(outputs) != len(group):
            return (
                f"{group[0][0][0]}, first of {len(group)} hidden calls: they did not come to their end in {limit:g} s"
            )
        for ((function, given, wanted), options), line in zip(group, outputs, strict=True):
            if not _gives(line, wanted, options.get("tolerance")):
                call = f"{function}({', '.join(map(repr, given))})"
                return f"{call:.200} gives {line.removeprefix('value '):.200}; {wanted!r:.200} is expected"
    return None if calls else "the row has no hidden calls"


def _gives(line: str, wanted: Any, tolerance: float | None) -> bool:
    if line == f"value {_ordered(wanted)!a}":
        return True
    if tolerance is None or not line.startswith("value "):
        return False
    try:
        return _close(ast.literal_eval(line[6:]), wanted, tolerance)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _close(value: Any, wanted: Any, tolerance: float) -> bool:
    if type(wanted) is float:
        slack = tolerance * abs(wanted) if abs(wanted) > 1 else tolerance
        return type(value) in (float, int) and wanted - slack <= value <= wanted + slack
    if type(value) is not type(wanted):
        return False
    if type(wanted) is list:
        return len(value) == len(wanted) and all(_close(*both, tolerance) for both in zip(value, wanted, strict=True))
    if type(wanted) is dict:
        return sorted(value) == sorted(wanted) and all(_close(value[name], wanted[name], tolerance) for name in wanted)
    return bool(value == wanted)


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ordered(value[name]) for name in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=512)
def drive(files: tuple[tuple[str, bytes], ...], calls: str, seconds: float, longest: int) -> tuple[str, ...]:
    """Run the driver, and return the lines of its output, none if it has more than `longest` bytes."""
    limits = ProcessLimits(seconds=seconds, processes=32, output_bytes=longest, printed_bytes=2**24 + longest)
    with ProcessSandbox(limits) as sandbox:
        try:
            for path, content in files:
                sandbox.write_file(path, content)
        except OSError:
            return ()
        done = sandbox.run(["python3", "-S", "-I", "-c", DRIVER], stdin=calls)
    return tuple(done.stdout.split("\n")[:-1]) if done.exit_code == 0 and not done.truncated else ()


# Containers


def _log_says_resolved(trajectory: Trajectory, truth: dict[str, Any]) -> bool:
    """Whether the log of the tests in the last message shows success. The message holds their exit code and output."""
    message = trajectory.final_observation[-1] if trajectory.final_observation else {}
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, str) or not content.startswith("graded ; exit "):
        return False
    head, _, log = content.partition("\n")
    wanted = {*truth["fail_to_pass"], *truth["pass_to_pass"]}
    if not wanted:
        return head == "graded ; exit 0"
    if ">>>>> Start Test Output" in log:
        log = log.split(">>>>> Start Test Output", 1)[1].rsplit(">>>>> End Test Output", 1)[0]
    good: set[str] = set()
    bad: set[str] = set()
    longest = max(map(len, wanted))
    for line in log.splitlines():
        first, *rest = line.split(maxsplit=1) or [""]
        if rest and line.startswith(first) and first in ("PASSED", "FAILED", "ERROR"):
            names = good if first == "PASSED" else bad
            text = rest[0].strip()  # a name, and perhaps a reason
            names |= {text, text.split()[0]}  # the first word is all that rows of SWE-bench hold of a name with spaces
            dash = text.find(" - ")
            while 0 <= dash <= longest:  # a line of the patch may hold 100,000 dashes
                names.add(text[:dash].strip())
                dash = text.find(" - ", dash + len(" - "))
        name, dots, rest = line.strip().rpartition(" ... ")
        if dots:
            (good if rest == "ok" else bad).add(name)
    return wanted <= good - bad
