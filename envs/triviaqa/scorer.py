"""The scorer, independent of the reward: this module shares no code with the environment or its rewards.

The scorer is strict: the answer must equal an accepted answer, up to case and surrounding space. TriviaQA's own
evaluation (https://github.com/mandarjoshi90/triviaqa) also removes articles and punctuation on both sides, so it
accepts more answers: "the beatles." for "Beatles".
"""

from __future__ import annotations

import re

from mtrl.types import Row, Trajectory

_PIECES = re.compile(r"(</?(?:tool|answer|result)>)")


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the assistant's last message gives exactly one answer, after its reasoning, which is accepted; else
    0.0."""
    answer = _last_answer(trajectory)
    accepted = [each.strip().lower() for each in row["ground_truth"]["answers"]]
    return float(bool(answer) and answer in accepted)


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the assistant's last message gives exactly one readable answer, right or wrong."""
    return bool(_last_answer(trajectory))


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`, which is 1.0 if the last message gives exactly one readable answer, and `contains`, which is 1.0
    if an accepted answer occurs in it; else 0.0."""
    answer = _last_answer(trajectory)
    accepted = (each.strip().lower() for each in row["ground_truth"]["answers"])
    return {"format": float(bool(answer)), "contains": float(any(each and each in answer for each in accepted))}


def _last_answer(trajectory: Trajectory) -> str:
    """Return the answer in the assistant's last message; empty if there is none."""
    responses = [message.get("content") for message in trajectory.messages if message.get("role") == "assistant"]
    return _answer(responses[-1]) if responses and isinstance(responses[-1], str) else ""


def _answer(text: str) -> str:
    """Return the text between the only two tags of a message, which must be those of an answer; else an empty text."""
    pieces = _PIECES.split(text.split("</think>")[-1])
    if len(pieces) != 5 or pieces[1::2] != ["<answer>", "</answer>"] or "</reasoning>" in pieces[2] + pieces[4]:
        return ""
    return pieces[2].strip().lower()
