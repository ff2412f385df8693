"""Single responses that checks repeat: those of gold and the demonstrator, and responses without content."""

from __future__ import annotations

from mtrl.preflight.context import Context
from mtrl.preflight.responses import nonsense

IDLE = ("", "?", "yes")
TOOL_MOVES = 4


def tool_moves(context: Context) -> list[str]:
    """Return responses of gold and the demonstrator that are not the last of their episode: tool calls, looks,
    moves."""
    episodes = [*context.solved, *context.weak]
    return list(dict.fromkeys(text for e in episodes for text in e.responses[:-1]))[:TOOL_MOVES]


def answers(context: Context, number: int) -> list[str]:
    """Return well-formed answers that are wrong on the `number`-th row: a known wrong answer, if any, and nonsense."""
    if not context.gold:
        return []
    episode = context.gold[min(number, len(context.gold) - 1)]
    if not episode.responses:
        return []
    return [*context.wrong.get(context.key(episode), [])[:1], *nonsense(episode.responses[-1])[:1]]


def spam_moves(context: Context, number: int) -> list[str]:
    """Return all responses that are worth repeating on the `number`-th row."""
    return list(dict.fromkeys([*tool_moves(context), *answers(context, number), *IDLE]))
