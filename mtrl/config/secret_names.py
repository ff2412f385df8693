"""Which environment variables hold secrets, by their names and values."""

from __future__ import annotations

import re

_NAME = re.compile(
    r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?|.+_(PWD|PAT|PASS|DSN|AUTH)|(.+_)?(SECRET|AUTH)_.+"
    r"|(.+_)?DATABASE_URL|PGPASSFILE",
    re.IGNORECASE,
)
_URL = re.compile(r"\w+://[^/\s@]*:[^/\s@]+@")
"""A URL with a password in it."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether nobody should read the value of this variable."""
    return bool(_NAME.fullmatch(name) or _URL.search(value))
