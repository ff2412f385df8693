"""Comparison of two tokenizers by what they do, not by their names."""

from __future__ import annotations

from typing import Any

SAMPLE = 'The total is 1,234.56 (not 98 %):\n\tSELECT "name" FROM t WHERE x >= 7; {"ключ": [naïve, 東京]}  \n'
"""Text with words, digits, punctuation, code, several scripts and white space, in which families of tokenizers
differ."""


def difference(teacher: Any, student: Any) -> str | None:
    """Return how the teacher's tokenizer reads the student's tokens or texts otherwise, as a clause; None if it does
    not. Tokens that only the teacher has make no difference, since the student never samples them.

    Args:
        teacher, student: tokenizers of Transformers.
    """
    theirs = teacher.get_vocab()
    for token, number in sorted(student.get_vocab().items(), key=lambda item: item[1]):
        if (other := theirs.get(token)) != number:
            there = "no token" if other is None else f"token {other}"
            return f"token {number} of the policy, {token!r}, is {there} of the teacher"
    one, other = (tokenizer.encode(SAMPLE, add_special_tokens=False) for tokenizer in (student, teacher))
    if one != other:
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        word = student.decode(one[place : place + 1])
        return f"the two split the text {SAMPLE[:20]!r}… into different tokens from token {place} on, {word!r}"
    return None
