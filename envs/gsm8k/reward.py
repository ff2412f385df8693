"""The rewards of answers.

The answer is well-formatted when the message holds exactly one `#### number` and ends with it.
"""

from __future__ import annotations

import re
from decimal import Decimal

from mtrl.errors import UserError

SCHEMES = ("default", "guide")
FORMAT_BUDGET = 0.2
"""Total reward of an episode of only well-formatted wrong answers, under the scheme `guide`."""

_NUMBER = r"(?:-?\$?|\$-)(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_CLAIM = re.compile(r"(?<!#)####[ \t$.-]*[0-9]")
_ANSWER = re.compile(rf"(?<!#)####[ \t]*({_NUMBER})\s*\Z")


def parse_number(text: str) -> Decimal | None:
    """Return the value of `72`, `72.`, `72.0`, `1,000`, `$5` or `-3`; None if `text` is anything else."""
    text = text.strip()
    return Decimal(text.replace("$", "").replace(",", "")) if re.fullmatch(_NUMBER, text) else None


def parse_answer(response: str) -> Decimal | None:
    """Return the answer of a well-formatted response; None if the response is not well-formatted."""
    answer = _ANSWER.search(response)
    if answer is None or len(_CLAIM.findall(response)) != 1:  # `#### 1 or #### 72` gives two answers
        return None
    return parse_number(answer[1])


class TurnReward:
    """Computes the rewards of the answers of one episode, turn by turn.

    - `default`: 1.0 for a right answer, else 0.0. The format has no reward: any reward for well-formed wrong answers
      creates a local optimum that solves no problem, and policies with few successes end there.
    - `guide`: 1.0 for a right answer; `0.2 / max_turns` for a well-formatted wrong answer; else 0.0. With five turns,
      four wrong answers and then the right one receive 1.16, more than the right answer at once.
    """

    def __init__(self, scheme: str, max_turns: int):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to gsm8k; choose one of {', '.join(SCHEMES)}")
        self.format_reward = FORMAT_BUDGET / max_turns if scheme == "guide" else 0.0

    def components(self, answer: Decimal | None, truth: Decimal) -> dict[str, float]:
        """Return the components of this turn's reward; their sum is the reward."""
        wrong = answer is not None and answer != truth
        return {"correct": float(answer == truth), "format": self.format_reward if wrong else 0.0}
