"""The scorer, independent of the reward: it shares no code with `environment.py`, `exact_match.py` or `reward.py`."""

from __future__ import annotations

from itertools import groupby

from mtrl.types import Row, Trajectory

TAGS = tuple(f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/"))
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
ARTICLES = {"a", "an", "the"}


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the last assistant message gives one of the row's answers, by SQuAD's exact match; else 0.0."""
    answer = _answer(_last_content(trajectory))
    return float(answer is not None and reduced(answer) in map(reduced, row["ground_truth"]["target"]))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message gives exactly one readable answer, right or wrong."""
    return _answer(_last_content(trajectory)) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`, which is 1.0 if the last assistant message gives exactly one readable answer, and `contains`,
    which is 1.0 if all words of an accepted answer occur in it consecutively; else 0.0."""
    answer = _answer(_last_content(trajectory))
    words = "" if answer is None else " ".join(("", *reduced(answer), ""))
    accepted = (" ".join(("", *reduced(target), "")) for target in row["ground_truth"]["target"])
    return {"format": float(answer is not None), "contains": float(any(each in words for each in accepted))}


def _last_content(trajectory: Trajectory) -> object:
    """Return the content of the last assistant message."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return responses[-1].get("content") if responses else None


def _answer(content: object) -> str | None:
    """Return the text between the only `<answer>` and `</answer>` of a message that holds no other tag; else None."""
    if not isinstance(content, str):
        return None
    before, opened, rest = content.split("</think>")[-1].partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    if not opened or not closed or any(tag in part for part in (before, answer, after) for tag in TAGS):
        return None
    return answer.strip() or None


def reduced(text: str) -> tuple[str, ...]:
    """Return the words to compare, in lower case: without punctuation, and then without articles between word
    boundaries."""
    letters = [letter for letter in text.lower() if letter not in PUNCTUATION]
    runs = ("".join(run) for _, run in groupby(letters, key=str.isalnum))
    words = "".join(" " if run in ARTICLES else run for run in runs).split()
    return tuple(words) if words else ("nothing but", text.lower().strip())
