"""Comparison of two tokenizers by what they do, not by their names."""

from __future__ import annotations

from typing import Any

SAMPLE = 'The total is 1,234.56 (not 98 %):\n\tSELECT "name" FROM t WHERE x >= 7; {"ключ": [naïve, 東京]}  \n'
"""Text with words, digits, punctuation, code, several scripts and white space, in which families of tokenizers
differ."""


def difference(other: Any, own: Any, others: str = "the teacher", owns: str = "the policy") -> str | None:
    """Return how another tokenizer reads a policy's tokens or texts otherwise, as a clause; None if it does not. Tokens
    that only the other one has make no difference, since the policy never samples them.

    Args:
        other, own: tokenizers of Transformers.
        others, owns: their owners, for the clause.
    """
    theirs = other.get_vocab()
    for token, number in sorted(own.get_vocab().items(), key=lambda item: item[1]):
        if (there := theirs.get(token)) != number:
            found = "no token" if there is None else f"token {there}"
            return f"token {number} of {owns}, {token!r}, is {found} of {others}"
    ours, read = (tokenizer.encode(SAMPLE, add_special_tokens=False) for tokenizer in (own, other))
    if ours != read:
        place = next((i for i, (a, b) in enumerate(zip(ours, read, strict=False)) if a != b), min(len(ours), len(read)))
        word = own.decode(ours[place : place + 1])
        return f"the two split the text {SAMPLE[:20]!r}… into different tokens from token {place} on, {word!r}"
    return None
