"""What the customer hears of a response, and the codes in it."""

from __future__ import annotations

import re

LONGEST = 2000
"""Maximum length of the agent's words in one turn, in characters; the customer does not hear the rest."""
_CODE = re.compile(r"\b[A-Z][0-9]{3}\b")


def spoken(response: str) -> str:
    """Return the words that the customer hears: the text after the agent's thoughts, and before an unfinished one."""
    visible = response.rpartition("</think>")[2].partition("<think>")[0]
    return visible.strip()[:LONGEST]


def codes(text: str) -> set[str]:
    """Return the codes in a text, such as R318: a capital letter and three digits."""
    return set(_CODE.findall(text))
