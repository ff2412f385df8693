"""The agent's patch, restricted to source files."""

from __future__ import annotations

import re

from envs.mini_swe.sources import is_source

MOST_CHARACTERS = 2**20
_HEADER = re.compile(r'diff --git (?:"a/(?P<quoted>.*)" "b/.*"|a/(?P<plain>.*) b/(?P=plain))')
_LINK = re.compile(r"^(?:new file mode|new mode|index \S+|deleted file mode) (?:120000|160000)$", re.MULTILINE)


def source_patch(diff: str) -> str:
    """Return the parts of `git diff`'s output that change source files, without links, submodules and binary files.

    Each part is checked by its header lines alone: a part whose header lines do not all name the same file is dropped.
    """
    if len(diff) > MOST_CHARACTERS:
        return ""
    parts = re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE)
    return "".join(part for part in parts if _is_kept(part))


def _is_kept(part: str) -> bool:
    found = _HEADER.fullmatch(part.partition("\n")[0])
    if found is None or found["plain"] is None or not is_source(found["plain"]):
        return False  # source files have no names that git quotes
    path = found["plain"]
    header = re.split(r"^@@ ", part, maxsplit=1, flags=re.MULTILINE)
    if len(header) == 1 and "\nnew file mode 100" not in part and "\ndeleted file mode 100" not in part:
        return False  # only mode changes, or binary
    if _LINK.search(header[0]) or "GIT binary patch" in header[0]:
        return False
    named = re.findall(r"^(?:---|\+\+\+) (.*)$", header[0], re.MULTILINE)
    renamed = re.search(r"^(?:rename|copy) (?:from|to) ", header[0], re.MULTILINE)
    return renamed is None and all(name.rstrip("\t") in (f"a/{path}", f"b/{path}", "/dev/null") for name in named)
