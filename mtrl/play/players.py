"""The players: the person at the keyboard, the perfect player of the family, or its weak demonstrator."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from mtrl.config.messages import unknown_choice
from mtrl.environments.family import Family
from mtrl.environments.players import demonstrator_moves, gold_responses
from mtrl.errors import UserError
from mtrl.play.keyboard import Keyboard, PlayerCommand
from mtrl.types import Row

PLAYERS = ("me", "gold", "demonstrator")

Moves = Callable[[str | None], str | PlayerCommand | None]
"""Function from the environment's last text (None before the first response) to the next response; None ends the
episode."""


def check_player(name: str, family: Family) -> None:
    """Check the name of a player.

    Raises:
        UserError: the name is unknown, or the family has no such player.
    """
    if name not in PLAYERS:
        raise unknown_choice("player", name, PLAYERS)
    has = {"me": True, "gold": family.gold is not None, "demonstrator": family.demonstrate is not None}
    if not has[name]:
        others = ", ".join(f"player={other}" for other in PLAYERS if has[other])
        raise UserError(f"player={name}: the family {family.name} has none; it has {others}")


def gold_moves(family: Family, row: Row) -> list[str]:
    """Return the responses of the perfect player."""
    return gold_responses(family, copy.deepcopy(row))


def moves_of(name: str, family: Family, row: Row, seed: str, keyboard: Keyboard) -> Moves:
    """Return a player for one episode; `seed` is the seed of the demonstrator's random choices."""
    if name == "gold":
        left = iter(gold_moves(family, row))
        return lambda observation: next(left, None)
    if name == "demonstrator":
        return demonstrator_moves(family, copy.deepcopy(row), random.Random(seed))
    return lambda observation: keyboard.read()
