"""All texts of the environment."""

from __future__ import annotations

from mtrl.types import Message

SINGLE_TURN = ' Let\'s think step by step and output the final answer after "####".'
MULTI_TURN = ' Let\'s think step by step and output a tentative numeric answer after "####".'
CALCULATOR = (
    " Before you answer you may compute: a message with <calc>expression</calc> and without an answer is replied to"
    " with the value of the expression (numbers, + - * / and parentheses)."
)
REASON = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in the exact"
    " format: '#### ANSWER'."
)
LAST_TURN = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."

# The synthetic problems are for models with contexts of a few dozen tokens, so each text is one short line.
TRY_AGAIN = "wrong, try again"
NO_ANSWER = "no answer, end with #### number"


def opening(question: str, multi_turn: bool, calculator: bool) -> list[Message]:
    """Return the prompt of a real GSM8K question."""
    if not multi_turn:
        return [{"role": "user", "content": question + SINGLE_TURN}]
    return [{"role": "user", "content": question + MULTI_TURN + (CALCULATOR if calculator else "")}]


def feedback(synthetic: bool, well_formatted: bool, turns_left: int) -> str:
    """Return the reply to a turn that did not solve the problem."""
    if synthetic:
        return TRY_AGAIN if well_formatted else NO_ANSWER
    return REASON if turns_left > 1 else LAST_TURN
