"""Detection of secrets: environment variables and settings by their names, and texts by their form."""

from __future__ import annotations

import re

_KINDS = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|JWT"
_VARIABLE = re.compile(
    rf".*({_KINDS})S?|.+_(PWD|PAT|PASS|DSN|AUTH)|(.+_)?(SECRET|AUTH)_.+|(.+_)?DATABASE_URL|PGPASSFILE"
    # The suffix may number or describe the secret (`KEY_1`), but not its location, size or lifetime (`KEY_FILE`).
    rf"|.*({_KINDS})_(?!(.+_)?(PATH|FILE|DIR|NAME|ENV|TYPE|SIZE|LENGTH|LIMIT|COUNT|TIMEOUT|TTL)$).+",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(.*_)?((api|access|private|secret|signing|encryption)_?key|(client|app|api|shared)_?secret|passw(or)?d|passphrase"
    r"|pwd|jwt|cookie|authorization|(access|auth|api|bearer|session|refresh|hf|hub|gh|github|gitlab)_?token)s?(_?\d+)?",
    re.IGNORECASE,
)
"""Pattern of settings that hold secrets. It is narrower than `_VARIABLE`, since `pad_token`, `max_new_tokens`,
`answer_key` and the secret word of a game are ordinary settings."""
_TOKEN = re.compile(r"[^\s<>\[\]/|$]{8,}")
"""Pattern of the value of a setting named `token` that is an access token and not a special token such as `<eos>`."""
_URL = re.compile(r"(\w+://[^/\s@:]*):[^/\s@]+@")
"""Pattern of a URL that contains a password."""
_QUERY = re.compile(r"[?&]([\w-]+)=([^\s&]+)")
_WORD = re.compile(
    r"(?<![\w-])(sk-[A-Za-z0-9]{20,}|sk-(proj|ant|or|svcacct|admin)-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|A[KS]IA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)(?![A-Za-z0-9])|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?i:authorization): *\w+ +[^\s$'\"<{]{6,}"
)
"""Pattern of keys with a known prefix of their service, of private keys, and of the `Authorization` header."""
_SET = re.compile(r"(?:^|[\s'\"])-{0,2}([A-Za-z][\w-]*)=([^\s'\"]+)")
_GIVEN = re.compile(r"(?:^|\s)--?([A-Za-z][\w-]*)\s+([^\s'\"-][^\s'\"]*)")
"""Patterns of `NAME=VALUE` and `--name=value` (`_SET`), and of `--name value` (`_GIVEN`), in a command."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether the environment variable seems to hold a secret, which must not be shown."""
    return bool(_VARIABLE.fullmatch(name)) or holds_secret(value)


def names_secret(setting: str, value: str) -> bool:
    """Return whether the setting seems to hold a secret; `$NAME` refers to a variable and is no secret."""
    setting = setting.strip("-").replace("-", "_").replace(".", "_")
    if not value or value.startswith("$"):
        return False
    is_token = setting.lower() in ("token", "tokens") and bool(_TOKEN.fullmatch(value))
    return is_token or bool(_SETTING.fullmatch(setting))


def holds_secret(text: str) -> bool:
    """Return whether a text contains a URL with a password or key, or a key of a known form."""
    return _has_secret(_QUERY, text) or bool(_URL.search(text) or _WORD.search(text))


def shows_secret(command: list[str]) -> bool:
    """Return whether the words of a command contain a secret."""
    line = " ".join(command)
    return _has_secret(_SET, line) or _has_secret(_GIVEN, line) or holds_secret(line)


def without_password(url: str) -> str:
    """Return the URL with its password replaced by `***`."""
    return _URL.sub(r"\1:***@", url)


def _has_secret(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether the pattern, whose groups are a name and a value, finds a secret in the text."""
    return any(names_secret(*match.groups()) for match in pattern.finditer(text))
