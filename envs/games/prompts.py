"""All texts of the environment, except those of the games (`opening`, `Outcome.observation`)."""

from __future__ import annotations

from mtrl.types import Message

MALFORMED = "write one <move>"
RULES = {
    "mastermind": """You play Mastermind. The code is made of the digits that you are shown; digits may repeat.
In each turn, reason first, then write one guess such as <move>522</move>, with as many digits as the code has.
A mark for every place comes back: + this digit is right, ~ it is not right but occurs in another place, \
- it is not in the code. You win when every digit is right. The number of guesses is limited.""",
    "maze": """You walk through a maze on a grid. In each turn, reason first, then take one step: \
<move>north</move>, <move>east</move>, <move>south</move> or <move>west</move>.
After each step you see which ways are open and where the goal lies as the crow flies; walls may be in between. \
You win when you stand on the goal. The number of steps is limited.""",
}
"""System prompts for real language models; the tiny policy knows the rules from its warm start."""


def prompt(game: str, opening: str, full: bool) -> list[Message]:
    """Return the prompt of a row."""
    user = {"role": "user", "content": opening}
    return [{"role": "system", "content": RULES[game]}, user] if full else [user]


def observation(seen: str, turns_left: int) -> str:
    """Return the observation after a turn."""
    return f"{seen} ; {turns_left} left"
