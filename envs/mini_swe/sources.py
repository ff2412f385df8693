"""Which of the agent's changes count: source files, and nothing by which they could take over the tests."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

TESTS = ("test", "tests", "testing")
"""Folders of tests."""
FORBIDDEN = ("test_*.py", "*_test.py", "conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "noxfile.py")
"""Python files that are tests, or that run before tests without being imported by them."""
MOST_BYTES = 2**20
"""Of all source files together."""

Files = dict[str, bytes]


def is_source(path: str) -> bool:
    """Whether an agent may change the file: Python, not hidden, no test, nothing that Python or pytest runs unasked.

    All the other ways in (`*.pth`, `pytest.ini`, `tox.ini`, `setup.cfg`, compiled modules) are not `.py`.
    """
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") or part in (*TESTS, "__pycache__") for part in parts):
        return False
    return parts[-1].endswith(".py") and not any(fnmatchcase(parts[-1].lower(), name) for name in FORBIDDEN)


def merged(original: Mapping[str, str], snapshot: Mapping[str, bytes | None]) -> Files | None:
    """The original repository with the source files as the agent left them; None if they are too large.

    Args:
        original: path -> text.
        snapshot: path -> content, None for links, pipes and whatever else is no plain file: those count as deleted.
    """
    files = {path: text.encode() for path, text in original.items() if not is_source(path)}
    files |= {path: content for path, content in snapshot.items() if is_source(path) and content is not None}
    if sum(map(len, files.values())) - sum(map(len, original.values())) > MOST_BYTES:
        return None
    return files
