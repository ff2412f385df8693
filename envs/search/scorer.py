"""Success, judged apart from the reward: nothing is shared with `environment.py`, `exact_match.py` or `reward.py`."""

from __future__ import annotations

from itertools import groupby

from mtrl.types import Row, Trajectory

TAGS = tuple(f"<{slash}{name}>" for name in ("search", "answer", "information") for slash in ("", "/"))
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
ARTICLES = {"a", "an", "the"}


def score(trajectory: Trajectory, row: Row) -> float:
    """1.0 if the last assistant message answers, and the answer is one of the row's, to SQuAD's exact match."""
    answer = _answer(_last_content(trajectory))
    return float(answer is not None and _reduced(answer) in map(_reduced, row["ground_truth"]["target"]))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the last assistant message gives one answer that can be read, right or wrong."""
    return _answer(_last_content(trajectory)) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """`format`: the last assistant message gives one answer that can be read; `contains`: all words of an accepted
    answer stand in it in a row, whatever else does."""
    answer = _answer(_last_content(trajectory))
    words = "" if answer is None else " ".join(("", *_reduced(answer), ""))
    accepted = (" ".join(("", *_reduced(target), "")) for target in row["ground_truth"]["target"])
    return {"format": float(answer is not None), "contains": float(any(each in words for each in accepted))}


def _last_content(trajectory: Trajectory) -> object:
    """Of what the assistant said."""
    said = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return said[-1].get("content") if said else None


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
