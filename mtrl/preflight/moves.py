"""Single responses that are tried over and over: what the task's own players say, and what says nothing."""

from __future__ import annotations

from mtrl.preflight.context import Context
from mtrl.preflight.responses import nonsense

IDLE = ("", "?", "yes")
TOOL_MOVES = 4


def tool_moves(context: Context) -> list[str]:
    """Responses of gold and of the weak player that are not the last of an episode: calls, looks, moves."""
    episodes = [*context.solved, *context.weak]
    return list(dict.fromkeys(text for e in episodes for text in e.responses[:-1]))[:TOOL_MOVES]


def answers(context: Context, number: int) -> list[str]:
    """Well-formed answers that are wrong on the `number`-th row: other rows' gold where there is any, and nonsense."""
    if not context.gold:
        return []
    episode = context.gold[min(number, len(context.gold) - 1)]
    if not episode.responses:
        return []
    return [*context.wrong.get(context.key(episode), [])[:1], *nonsense(episode.responses[-1])[:1]]


def spam_moves(context: Context, number: int) -> list[str]:
    """Everything that is worth repeating on the `number`-th row."""
    return list(dict.fromkeys([*tool_moves(context), *answers(context, number), *IDLE]))
