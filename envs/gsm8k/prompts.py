"""All texts of the environment."""

from __future__ import annotations

from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message, Row

SYSTEM = """You solve word problems. Reason step by step, in a few short sentences. Then end your message with the \
answer: a last line of four number signs and the number, such as #### 72. Write #### nowhere else, and no unit after \
the number."""
SYSTEM_CALCULATOR = """
You can use a calculator before you answer: a message with one <calc>expression</calc> and without an answer is \
replied to with the value. An expression has numbers, + - * / and parentheses."""
QUESTION = "Ann buys 3 boxes of 12 pens and gives 5 pens to a friend. How many pens does she have left?"
EXAMPLE: list[Line] = [
    ("User", QUESTION),
    ("Assistant", "The boxes hold 3 * 12 = 36 pens. She gives 5 away, so 36 - 5 = 31 pens are left.\n#### 31"),
]
EXAMPLE_CALCULATOR: list[Line] = [
    ("User", QUESTION),
    ("Assistant", "The boxes hold 3 * 12 pens, and 5 are given away: <calc>3 * 12 - 5</calc>"),
    ("User", "31"),
    ("Assistant", "So 31 pens are left.\n#### 31"),
]
EXAMPLE_ROW: Row = {"id": "worked example", "prompt": [], "question": QUESTION, "ground_truth": {"answer": "31"}}
"""The row that both examples solve."""

# The published prompts of SkyRL, for rows of `data.path`.
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

# For models with contexts of a few dozen tokens, so each text is one short line.
TRY_AGAIN = "wrong, try again"
NO_ANSWER = "no answer, end with #### number"


def full_prompt(question: str, calculator: bool) -> list[Message]:
    """Return the prompt for a language model."""
    instructions = SYSTEM + (SYSTEM_CALCULATOR if calculator else "")
    system = with_example(instructions, EXAMPLE_CALCULATOR if calculator else EXAMPLE)
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def opening(question: str, multi_turn: bool, calculator: bool) -> list[Message]:
    """Return SkyRL's prompt of a real GSM8K question."""
    if not multi_turn:
        return [{"role": "user", "content": question + SINGLE_TURN}]
    return [{"role": "user", "content": question + MULTI_TURN + (CALCULATOR if calculator else "")}]


def feedback(short: bool, well_formatted: bool, turns_left: int) -> str:
    """Return the reply to a turn that did not solve the problem; the `short` one is for the tiny policy."""
    if short:
        return TRY_AGAIN if well_formatted else NO_ANSWER
    return REASON if turns_left > 1 else LAST_TURN
