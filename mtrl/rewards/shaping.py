"""Built-in shapings: components of the reward that depend only on the trajectory, not on the task.

A shaping maps a trajectory of T turns and its row to T numbers; its keyword arguments are keys of the config. Penalties
are negative numbers, so their weights are positive::

    reward:
      components: {environment: 1.0, length_penalty: {weight: 0.2, max_tokens: 512, buffer_tokens: 128}}
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mtrl.algorithms.registry import Registry
from mtrl.errors import UserError
from mtrl.rewards.checked import checked_by
from mtrl.types import FinishReason, Row, StopReason, Trajectory

SHAPINGS = Registry("reward.components", "mtrl.rewards.shaping")
shaping = SHAPINGS.register

CUT_SHORT = frozenset({StopReason.MAX_TURNS, StopReason.TURN_TOKEN_LIMIT, StopReason.CONTEXT_LIMIT})


def _check_counts(name: str, **parameters: Any) -> None:
    """Check that the parameters of the shaping `name` are counts; a negative one would make a penalty a reward."""
    for key, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UserError(f"reward.components.{name}.{key}={value!r} must be a number of at least 0")


@shaping("length_penalty")
@checked_by(partial(_check_counts, "length_penalty"))
def length_penalty(trajectory: Trajectory, row: Row, *, max_tokens: int, buffer_tokens: int = 0) -> list[float]:
    """Penalty of each turn, from 0 to -1: it is 0 up to `max_tokens - buffer_tokens` sampled tokens, then falls
    linearly to -1 at `max_tokens` (soft overlong punishment, DAPO, 2503.14476, eq. 13)."""
    free = max_tokens - buffer_tokens
    excess = [len(turn.action_ids) - free for turn in trajectory.turns]
    return [0.0 if tokens <= 0 else -min(tokens / buffer_tokens, 1.0) if buffer_tokens else -1.0 for tokens in excess]


@shaping("turn_penalty")
@checked_by(partial(_check_counts, "turn_penalty"))
def turn_penalty(trajectory: Trajectory, row: Row, *, free_turns: int = 1) -> list[float]:
    """-1 for each turn after the first `free_turns`."""
    return [0.0 if turn < free_turns else -1.0 for turn in range(len(trajectory.turns))]


@shaping("cut_short_penalty")
def cut_short_penalty(trajectory: Trajectory, row: Row) -> list[float]:
    """-1 on the last turn of an episode that a limit on turns, tokens of a turn, or context ended, or whose last turn
    the token limit truncated, however the episode ended."""
    last = len(trajectory.turns) - 1
    is_cut = trajectory.stop_reason in CUT_SHORT or (last >= 0 and trajectory.turns[last].finish == FinishReason.LENGTH)
    return [-1.0 if turn == last and is_cut else 0.0 for turn in range(last + 1)]
