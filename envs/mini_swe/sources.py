"""The rule for the agent's changes: only source files count, and no files that could manipulate the tests."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

TESTS = ("test", "tests", "testing")
"""Names of test folders."""
FORBIDDEN = ("test_*.py", "*_test.py", "conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py", "noxfile.py")
"""Name patterns of Python files that are tests, or that run before tests without an import."""
MOST_BYTES = 2**20
"""Maximum growth of all files together, in bytes."""

Files = dict[str, bytes]


def is_source(path: str) -> bool:
    """Whether an agent may change the file: a Python file that is not hidden, no test, and not run automatically by
    Python or pytest.

    Other files that could manipulate the tests (`*.pth`, `pytest.ini`, `tox.ini`, `setup.cfg`, compiled modules) are
    not `.py`.
    """
    parts = PurePosixPath(path).parts
    if any(part.startswith(".") or part in (*TESTS, "__pycache__") for part in parts):
        return False
    return parts[-1].endswith(".py") and not any(fnmatchcase(parts[-1].lower(), name) for name in FORBIDDEN)


def merged(original: Mapping[str, str], snapshot: Mapping[str, bytes | None]) -> Files | None:
    """Return the original repository with the agent's version of the source files; None if they are too large.

    Args:
        original: text by path.
        snapshot: content by path; None for links, pipes and other files that are not regular, which count as deleted.
    """
    files = {path: text.encode() for path, text in original.items() if not is_source(path)}
    files |= {path: content for path, content in snapshot.items() if is_source(path) and content is not None}
    if sum(map(len, files.values())) - sum(len(text.encode()) for text in original.values()) > MOST_BYTES:
        return None
    return files
