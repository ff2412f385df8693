"""Success, judged apart from the reward: nothing here is shared with the environment or its rewards.

Strict: the answer must be one of the accepted ones, but for case and blanks around. TriviaQA's own evaluation
(https://github.com/mandarjoshi90/triviaqa) also drops articles and punctuation on both sides, so it accepts more:
"the beatles." for "Beatles".
"""

from __future__ import annotations

import re

from mtrl.types import Row, Trajectory

_PIECES = re.compile(r"(</?(?:tool|answer|result)>)")


def score(trajectory: Trajectory, row: Row) -> float:
    """1.0 if the assistant's last message gives one answer, after its reasoning, and an accepted one."""
    answer = _last_answer(trajectory)
    accepted = [each.strip().lower() for each in row["ground_truth"]["answers"]]
    return float(bool(answer) and answer in accepted)


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the assistant's last message gives one answer that can be read, right or wrong."""
    return bool(_last_answer(trajectory))


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """`format`: the last message gives one answer that can be read; `contains`: an accepted one occurs in it."""
    answer = _last_answer(trajectory)
    accepted = (each.strip().lower() for each in row["ground_truth"]["answers"])
    return {"format": float(bool(answer)), "contains": float(any(each and each in answer for each in accepted))}


def _last_answer(trajectory: Trajectory) -> str:
    """That of the assistant's last message; empty if there is none."""
    said = [message.get("content") for message in trajectory.messages if message.get("role") == "assistant"]
    return _answer(said[-1]) if said and isinstance(said[-1], str) else ""


def _answer(text: str) -> str:
    """What stands between the only two tags of a message, which must be those of an answer; else nothing."""
    pieces = _PIECES.split(text.split("</think>")[-1])
    if len(pieces) != 5 or pieces[1::2] != ["<answer>", "</answer>"] or "</reasoning>" in pieces[2] + pieces[4]:
        return ""
    return pieces[2].strip().lower()
