"""What holds a secret: environment variables by their names, settings by theirs, and texts by their form."""

from __future__ import annotations

import re

_KINDS = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|JWT"
_VARIABLE = re.compile(
    rf".*({_KINDS})S?|.+_(PWD|PAT|PASS|DSN|AUTH)|(.+_)?(SECRET|AUTH)_.+|(.+_)?DATABASE_URL|PGPASSFILE"
    # one of several, or its form; what tells where it lies or how long it lives is none
    rf"|.*({_KINDS})_(?!(.+_)?(PATH|FILE|DIR|NAME|ENV|TYPE|SIZE|LENGTH|LIMIT|COUNT|TIMEOUT|TTL)$).+",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(.*_)?((api|access|private|secret|signing|encryption)_?key|(client|app|api|shared)_?secret|passw(or)?d|passphrase"
    r"|pwd|jwt|cookie|authorization|(access|auth|api|bearer|session|refresh|hf|hub|gh|github|gitlab)_?token)s?(_?\d+)?",
    re.IGNORECASE,
)
"""Narrower than for variables: `pad_token`, `max_new_tokens`, `answer_key` and the word of a game are settings too."""
_TOKEN = re.compile(r"[^\s<>\[\]/|$]{8,}")
"""What a setting named `token` holds if it is one that opens something, and not `<eos>`."""
_URL = re.compile(r"(\w+://[^/\s@:]*):[^/\s@]+@")
"""A URL with a password in it."""
_QUERY = re.compile(r"[?&]([\w-]+)=([^\s&]+)")
_WORD = re.compile(
    r"(?<![\w-])(sk-[A-Za-z0-9]{20,}|sk-(proj|ant|or|svcacct|admin)-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|A[KS]IA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)(?![A-Za-z0-9])|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?i:authorization): *\w+ +[^\s$'\"<{]{6,}"
)
"""Keys of services that begin as theirs do, and the header that carries one."""
_SET = re.compile(r"(?:^|[\s'\"])-{0,2}([A-Za-z][\w-]*)=([^\s'\"]+)")
_GIVEN = re.compile(r"(?:^|\s)--?([A-Za-z][\w-]*)\s+([^\s'\"-][^\s'\"]*)")
"""NAME=VALUE and --name=value, and --name value in the words of a command."""


def is_secret(name: str, value: str = "") -> bool:
    """Whether nobody should read the value of this environment variable."""
    return bool(_VARIABLE.fullmatch(name)) or holds_secret(value)


def names_secret(setting: str, value: str) -> bool:
    """Whether a setting of this name holds a secret with this value; `$NAME` is a variable's, and no secret."""
    setting = setting.strip("-").replace("-", "_").replace(".", "_")
    if not value or value.startswith("$"):
        return False
    is_token = setting.lower() in ("token", "tokens") and bool(_TOKEN.fullmatch(value))
    return is_token or bool(_SETTING.fullmatch(setting))


def holds_secret(text: str) -> bool:
    """Whether there is a password in a URL, or a key, in a text."""
    return _has_secret(_QUERY, text) or bool(_URL.search(text) or _WORD.search(text))


def shows_secret(command: list[str]) -> bool:
    """Whether the words of a command hold a secret."""
    line = " ".join(command)
    return _has_secret(_SET, line) or _has_secret(_GIVEN, line) or holds_secret(line)


def without_password(url: str) -> str:
    """A URL that may be shown."""
    return _URL.sub(r"\1:***@", url)


def _has_secret(pattern: re.Pattern[str], text: str) -> bool:
    """Whether one of the names and values that a pattern finds is a secret."""
    return any(names_secret(*match.groups()) for match in pattern.finditer(text))
