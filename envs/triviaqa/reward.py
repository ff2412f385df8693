"""The rewards of turns by the functions of a reward file: turn rewards in their turns, outcome rewards at the end."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.triviaqa.user_file import functions_of
from mtrl.errors import UserError
from mtrl.types import ENVIRONMENT, Message

KEY = "environment.config.reward_file"
SCHEMES = ("default", "original", "aws")
"""Names of this family's reward files, in `rewards/`."""

RewardFunction = Callable[..., Any]
"""`function(completions=[[message, …], …], answer=[[accepted answer, …], …]) -> [number, …]`, the signature of TRL."""


@dataclass(frozen=True)
class RewardFunctions:
    """The functions of a reward file's two lists, by the name of the component."""

    turn: dict[str, RewardFunction]
    outcome: dict[str, RewardFunction]


def load_rewards(scheme: str, path: str | None = None) -> RewardFunctions:
    """Return the functions of a scheme, or of a user's file that replaces it.

    A component has the name of its function, without the suffixes `_func` and `_reward`.

    Raises:
        UserError: the scheme is unknown or combined with a file, the file is invalid, or a name occurs twice.
    """
    if path and scheme != "default":
        raise UserError(f"reward.scheme={scheme} and {KEY}={path} exclude each other; leave one of them out")
    if not path and scheme not in SCHEMES:
        raise UserError(f"reward.scheme={scheme} is not known to triviaqa; choose one of {', '.join(SCHEMES)}")
    file = path or Path(__file__).parent / "rewards" / f"{scheme}.py"
    lists = [functions_of(file, KEY, name) for name in ("TURN_REWARD_FUNCS", "OUTCOME_REWARD_FUNCS")]
    turn, outcome = ({_name(function): function for function in listed} for listed in lists)
    names = [_name(function) for listed in lists for function in listed]
    if twice := next((name for name in names if names.count(name) > 1 or name == ENVIRONMENT), None):
        raise UserError(f"{KEY}={path}: the name {twice} is taken; rename the function")
    return RewardFunctions(turn, outcome)


class EpisodeReward:
    """Computes the rewards of the turns of one episode.

    A turn-reward function returns a number for the whole conversation. A turn receives the change of that number, so
    that the rewards add up to the function's value for the whole conversation. The last turn receives the outcome
    rewards; if a limit of the run ends the episode after a reply of the environment, that reply is the conversation's
    last message.
    """

    def __init__(self, functions: RewardFunctions):
        self.functions = functions
        self.conversation: list[Message] = []
        self.granted = dict.fromkeys(functions.turn, 0.0)

    def components(self, response: str, observation: str | None, answers: list[str], done: bool) -> dict[str, float]:
        """Return the components of this turn's reward, which is their sum. `observation` is the reply to the
        response."""
        self.conversation.append({"role": "assistant", "content": response})
        if observation is not None:
            self.conversation.append({"role": "user", "content": observation})
        earned = {name: self._ask(name, function, answers) for name, function in self.functions.turn.items()}
        parts = {name: value - self.granted[name] for name, value in earned.items()}
        self.granted = earned
        return parts | (self.outcomes(answers) if done else dict.fromkeys(self.functions.outcome, 0.0))

    def outcomes(self, answers: list[str]) -> dict[str, float]:
        """Return the outcome rewards at the end of the episode, by component."""
        return {name: self._ask(name, function, answers) for name, function in self.functions.outcome.items()}

    def _ask(self, name: str, function: RewardFunction, answers: list[str]) -> float:
        values = function(completions=[self.conversation], answer=[answers])
        value = values[0] if isinstance(values, list | tuple) and len(values) == 1 else None
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise UserError(
                f"{KEY}: {name} returned {values!r:.100} for one conversation; return a list with one finite number"
            )
        return float(value)


def _name(function: RewardFunction) -> str:
    return function.__name__.removesuffix("_func").removesuffix("_reward")
