"""Exact match and F1 as in SQuAD (https://rajpurkar.github.io/SQuAD-explorer, evaluate-v1.1.py)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Convert to lower case, remove ASCII punctuation, then articles, then collapse spaces.

    If the result would be empty ("The The", "!!!"), only the case is changed and the surrounding space is removed;
    otherwise all such texts would be the same answer.
    """
    lower = text.lower()
    bare = _ARTICLE.sub(" ", lower.translate(_PUNCTUATION))
    return " ".join(bare.split()) or lower.strip()


def is_match(answer: str, aliases: Iterable[str]) -> bool:
    """Whether an answer is one of the aliases."""
    words = normalise(answer)
    return bool(words) and any(words == normalise(alias) for alias in aliases)


def f1(answer: str, aliases: Iterable[str]) -> float:
    """Return the harmonic mean of precision and recall of the answer's words, for the alias with the highest one, in
    [0, 1]. The order of the words does not count."""
    words = Counter(normalise(answer).split())
    return max((_f1(words, Counter(normalise(alias).split())) for alias in aliases), default=0.0)


def _f1(words: Counter[str], others: Counter[str]) -> float:
    return 2 * (words & others).total() / max(words.total() + others.total(), 1)


def occurs(aliases: Iterable[str], text: str) -> bool:
    """Whether one of the aliases occurs in a text, as whole words."""
    within = f" {normalise(text)} "
    return any(f" {name} " in within for alias in aliases if (name := normalise(alias)))
