"""The hidden tests of a SWE-bench row: the script that runs them, and the evaluation of its log.

Unlike `grading.py`, this module trusts the output of the tests, as SWE-bench does, although the patch runs in the
interpreter that prints it. Patches cannot change tests and configuration, which rules out the simple exploits;
README.md lists the remaining ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from typing import Any

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR)[ \t]+(\S.*)$", re.MULTILINE)
_UNITTEST = re.compile(r"^(.+?) \.\.\. (ok|FAIL|ERROR|skipped.*|expected failure)$", re.MULTILINE)
_END_OF_PATCH = "MTRL_END_OF_TEST_PATCH"


def evaluation_script(truth: dict[str, Any]) -> str:
    """Return the row's own script, or else one that applies the patch of the tests and runs them with pytest."""
    if truth["eval_script"]:
        return truth["eval_script"]
    files = sorted({test.partition("::")[0] for test in (*truth["fail_to_pass"], *truth["pass_to_pass"])})
    patch = f"git apply - <<'{_END_OF_PATCH}'\n{truth['test_patch'].rstrip()}\n{_END_OF_PATCH}\n"
    return (
        f"set -e\n{patch if truth['test_patch'] else ''}set +e\necho '{START}'\n"
        f"python -m pytest -rA -p no:cacheprovider {shlex.join(files)}\ncode=$?\necho '{END}'\nexit $code\n"
    )


def resolved(log: str, returncode: int, truth: dict[str, Any]) -> bool:
    """Whether every test of `fail_to_pass` and `pass_to_pass` passed; if the row names no tests, whether the script
    succeeded."""
    wanted = set(truth["fail_to_pass"]) | set(truth["pass_to_pass"])
    if not wanted:
        return returncode == 0
    return all(status == {"PASSED"} for status in statuses(log, wanted).values())


def statuses(log: str, wanted: Collection[str]) -> dict[str, set[str]]:
    """Return the statuses of each wanted test in the log, from lines of `pytest -rA`, unittest and Django.

    A line of pytest ends with the name of a test, or with a name, ` - ` and a reason, and the name may hold ` - ` too.
    So each possible name has the status, and also the first word, which is all that rows of SWE-bench hold of a name
    with spaces.
    """
    _, started, tests = log.partition(START)
    tests = tests.rpartition(END)[0] or tests if started else log
    found: dict[str, set[str]] = {test: set() for test in wanted}
    # The patch may print a line with 100,000 dashes; the names before all of them would take gigabytes.
    longest = max(map(len, wanted), default=0) + len(" - ")
    for status, rest in _PYTEST.findall(tests):
        ends = (dash.start() for dash in re.finditer(" - ", rest[:longest]))
        for test in found.keys() & {rest.split()[0], rest.strip(), *(rest[:end].strip() for end in ends)}:
            found[test].add(status)
    for test, status in _UNITTEST.findall(tests):
        if test.strip() in found:
            found[test.strip()].add("PASSED" if status == "ok" else "FAILED")
    return found
