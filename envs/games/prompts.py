"""All texts of the environment, except those of the games (`opening`, `Outcome.observation`)."""

from __future__ import annotations

from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message, Row

MALFORMED = "write one <move>"
RULES = {
    "mastermind": """You play Mastermind. The code is made of the digits that you are shown; digits may repeat.
In each turn, reason first, then write one guess such as <move>522</move>, with as many digits as the code has.
The reply is a mark for every place: + this digit is right, ~ it occurs only in other places of the code, \
- it is not in the code. You win when every digit is right. The number of guesses is limited.""",
    "maze": """You walk through a maze on a grid. In each turn, reason first, then take one step: \
<move>north</move>, <move>east</move>, <move>south</move> or <move>west</move>.
After each step you see which directions are open, and how far away the goal is in each direction of the compass; \
there may be walls on the way. You win when you reach the goal. The number of steps is limited.""",
}
"""Instructions for language models; the tiny policy knows the rules from its warm start."""
EXAMPLES: dict[str, list[Line]] = {
    "mastermind": [
        ("User", "code of 2 from 1357"),
        ("Assistant", "I know nothing yet, so I try two digits. <move>13</move>"),
        ("User", "-~ ; 5 left"),
        ("Assistant", "1 is not in the code. 3 is in it, but not in the second place. <move>35</move>"),
        ("User", "+- ; 4 left"),
        ("Assistant", "3 is right, and 5 is not in the code. 3 or 7 may follow. <move>37</move>"),
    ],
    "maze": [
        ("User", "maze ; open east ; goal 1 south 1 east"),
        ("Assistant", "Only east is open. <move>east</move>"),
        ("User", "open south west ; goal 1 south ; 5 left"),
        ("Assistant", "The goal is one step to the south, and south is open. <move>south</move>"),
    ],
}
"""A worked example by game."""
EXAMPLE_ROWS: dict[str, Row] = {
    game: {"id": f"worked example of {game}", "prompt": [], "ground_truth": truth}
    for game, truth in {
        "mastermind": {"game": "mastermind", "code": "37", "symbols": "1357"},
        "maze": {"game": "maze", "grid": ["S.", "#G"]},
    }.items()
}
"""The row that each example solves."""


def prompt(game: str, opening: str, full: bool) -> list[Message]:
    """Return the prompt of a row."""
    user = {"role": "user", "content": opening}
    return [{"role": "system", "content": with_example(RULES[game], EXAMPLES[game])}, user] if full else [user]


def observation(seen: str, turns_left: int) -> str:
    """Return the observation after a turn."""
    return f"{seen} ; {turns_left} left"
