"""Success, judged apart from the reward: nothing is shared with `environment.py`, `exact_match.py` or `reward.py`."""

from __future__ import annotations

from itertools import groupby

from mtrl.types import Row, Trajectory

TAGS = tuple(f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/"))
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
ARTICLES = {"a", "an", "the"}


def score(trajectory: Trajectory, row: Row) -> float:
    """1.0 if the last assistant message answers, and the answer is one of the row's, to SQuAD's exact match."""
    said = [message for message in trajectory.messages if message.get("role") == "assistant"]
    answer = _answer(said[-1].get("content") if said else None)
    return float(answer is not None and _reduced(answer) in map(_reduced, row["ground_truth"]["target"]))


def _answer(content: object) -> str | None:
    """What stands between the only `<answer>` and `</answer>` of a message that holds no other tag."""
    if not isinstance(content, str):
        return None
    before, opened, rest = content.split("</think>")[-1].partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    if not opened or not closed or any(tag in part for part in (before, answer, after) for tag in TAGS):
        return None
    return answer.strip() or None


def _reduced(text: str) -> tuple[str, ...]:
    """The words that count, in lower case: punctuation falls away, then articles between word boundaries."""
    letters = [letter for letter in text.lower() if letter not in PUNCTUATION]
    runs = ("".join(run) for _, run in groupby(letters, key=str.isalnum))
    words = "".join(" " if run in ARTICLES else run for run in runs).split()
    return tuple(words) if words else ("nothing but", text.lower().strip())
