"""Text for terminals and pages: neutralise hostile text, shorten long text, and format numbers in few characters."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

MISSING = "–"

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that can move the cursor, reverse or hide text, or cannot be encoded."""
_BLANK = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180e\u180f\u2800\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),
    *map(chr, range(0xE0100, 0xE01F0)),
}
"""Characters of other categories that are shown as nothing: joiners, fillers, selectors of a glyph, the empty Braille
cell. Text of any length can be hidden in them."""
_STYLES = "\ufe0e\ufe0f"
"""Selectors of an emoji as text or as a picture; one directly after a visible character is ordinary."""


def clean(text: str) -> str:
    """Replace every character that could act on a terminal or hide text by its code (`\\x1b`); line breaks stay."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    pairs = zip("\n" + text, text, strict=False)
    return "".join(ch if ch == "\n" or _is_harmless(ch, before) else _code(ch) for before, ch in pairs)


def _is_harmless(ch: str, before: str) -> bool:
    if ch in _BLANK:
        return ch in _STYLES and not before.isspace() and _is_harmless(before, "\n")
    return unicodedata.category(ch) not in _UNSAFE


def _code(ch: str) -> str:
    return ch.encode("unicode_escape", "surrogatepass").decode("ascii")


def html_text(text: object) -> str:
    """Escape text of unknown origin for use within an HTML element: it holds no markup and no character that reverses
    or hides text."""
    return escape(clean(str(text)))


def one_line(text: Any, chars: int = 200) -> str:
    """Return a name or message of unknown origin as one clean line."""
    return clean(cut(str(text), chars, 1).replace("\n", " "))


def cut(text: str, chars: int, lines: int) -> str:
    """Leave out the middle of a long `text`, because its end matters as much as its beginning."""
    if len(text) > chars:
        text = f"{text[: chars // 2]} … {len(text) - chars // 2 * 2:,} characters … {text[-(chars // 2) :]}"
    rows = text.split("\n")
    if len(rows) > lines > 1:
        head, tail = lines - lines // 2, lines // 2
        rows = [*rows[:head], f"… {len(rows) - head - tail:,} lines …", *rows[-tail:]]
    return "\n".join(rows)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Replace every occurrence of a secret by stars; empty secrets are skipped."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return text


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def decimal(value: float) -> str:
    return f"{value:.3f}"


def signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def short(value: float) -> str:
    """Format a number with few digits: 3, 2.7, 0.56."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def scientific(value: float) -> str:
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """Format seconds as 1.8s, 42s, 3m12s or 1h05m."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole_seconds = round(seconds)
    minutes, rest = divmod(whole_seconds, 60)
    if whole_seconds < 60:
        return f"{whole_seconds}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def from_here(path: Path) -> Path:
    """Return the path as a user would type it here: relative if it lies below the working directory."""
    try:
        here = Path.cwd()
    except OSError:  # an environment may have changed to a folder that no longer exists
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
