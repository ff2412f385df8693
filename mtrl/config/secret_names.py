"""Detection of environment variables that hold secrets, by their names and values."""

from __future__ import annotations

import re

_NAME = re.compile(
    r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?|.+_(PWD|PAT|PASS|DSN|AUTH)|(.+_)?(SECRET|AUTH)_.+"
    r"|(.+_)?DATABASE_URL|PGPASSFILE",
    re.IGNORECASE,
)
_URL = re.compile(r"\w+://[^/\s@]*:[^/\s@]+@")
"""Pattern of a URL that contains a password."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether the variable seems to hold a secret, which must not be shown."""
    return bool(_NAME.fullmatch(name) or _URL.search(value))
