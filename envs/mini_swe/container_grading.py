"""The hidden tests of a SWE-bench row: the script that runs them, and what its log says.

Unlike `grading.py` this believes what the tests print, as SWE-bench does: the patch runs in the interpreter that
prints. That a patch cannot touch tests and configuration closes the simple ways; README.md names what is left.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_UNITTEST = re.compile(r"^(.+?) \.\.\. (ok|FAIL|ERROR|skipped.*|expected failure)$", re.MULTILINE)
_END_OF_PATCH = "MTRL_END_OF_TEST_PATCH"


def evaluation_script(truth: dict[str, Any]) -> str:
    """The row's own script; without one: apply the patch of the tests, then run those by pytest."""
    if truth["eval_script"]:
        return truth["eval_script"]
    files = sorted({test.partition("::")[0] for test in (*truth["fail_to_pass"], *truth["pass_to_pass"])})
    patch = f"git apply - <<'{_END_OF_PATCH}'\n{truth['test_patch'].rstrip()}\n{_END_OF_PATCH}\n"
    return (
        f"set -e\n{patch if truth['test_patch'] else ''}set +e\necho '{START}'\n"
        f"python -m pytest -rA -p no:cacheprovider {shlex.join(files)}\ncode=$?\necho '{END}'\nexit $code\n"
    )


def resolved(log: str, returncode: int, truth: dict[str, Any]) -> bool:
    """Whether every test of `fail_to_pass` and `pass_to_pass` passed; without any, whether the script succeeded."""
    wanted = set(truth["fail_to_pass"]) | set(truth["pass_to_pass"])
    if not wanted:
        return returncode == 0
    return all(status == {"PASSED"} for status in map(statuses(log).get, wanted))


def statuses(log: str) -> dict[str, set[str]]:
    """Test -> what the log says of it: lines of `pytest -rA`, and of unittest and Django."""
    _, started, tests = log.partition(START)
    tests = tests.rpartition(END)[0] or tests if started else log
    found: dict[str, set[str]] = {}
    for status, test in _PYTEST.findall(tests):
        found.setdefault(test.strip(), set()).add(status)
    for test, status in _UNITTEST.findall(tests):
        found.setdefault(test.strip(), set()).add("PASSED" if status == "ok" else "FAILED")
    return found
