"""Exact match as SQuAD judges it (https://rajpurkar.github.io/SQuAD-explorer, evaluate-v1.1.py)."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles, then with single spaces.

    Where nothing would be left ("The The", "!!!"), the text stays as it is but for case and blanks around: else any
    article would be the same answer.
    """
    lower = text.lower()
    bare = _ARTICLE.sub(" ", lower.translate(_PUNCTUATION))
    return " ".join(bare.split()) or lower.strip()


def is_match(answer: str, aliases: Iterable[str]) -> bool:
    """Whether an answer is one of the aliases."""
    said = normalise(answer)
    return bool(said) and any(said == normalise(alias) for alias in aliases)


def occurs(aliases: Iterable[str], text: str) -> bool:
    """Whether one of the aliases stands in a text, as whole words."""
    within = f" {normalise(text)} "
    return any(f" {name} " in within for alias in aliases if (name := normalise(alias)))
