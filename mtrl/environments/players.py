"""The players of a family, its `gold` and its `demonstrate`: calls of them, and sentences about their mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.types import Row
from mtrl.utils.plain_numbers import shown
from mtrl.utils.user_code import reason

DemonstratorMoves = Callable[[str | None], str | None]
"""Function from the environment's last text (None before the first action) to the demonstrator's next response; None if
it has no more responses."""


class PlayerError(UserError):
    """`gold` or `demonstrate` failed, or returned something else than it should. A player that rejects a row raises a
    plain `UserError`."""


def gold_responses(family: Family, row: Row) -> list[str]:
    """Return the responses of the perfect player.

    Raises:
        PlayerError: `gold` failed, or returned no list of texts.
        UserError: `gold` rejects the row.
    """
    assert family.gold is not None
    where = f"gold of {family.name}"
    try:
        responses = family.gold(row)
    except UserError:
        raise
    except Exception as error:
        raise PlayerError(f"{where} failed on row {row.get('id')}: {reason(error)}; fix gold") from error
    is_list = isinstance(responses, Sequence) and not isinstance(responses, str)
    if not is_list or not all(isinstance(response, str) for response in responses):
        raise PlayerError(
            f"{where} returned {shown(responses)} for row {row.get('id')}; return a list of texts, one for each turn"
        )
    return list(responses)


def demonstrator_moves(family: Family, row: Row, rng: random.Random) -> DemonstratorMoves:
    """Return the demonstrator of one episode.

    Raises:
        PlayerError: `demonstrate` failed, or returned no demonstrator.
        UserError: `demonstrate` rejects the row.
    """
    assert family.demonstrate is not None
    where = f"demonstrate of {family.name}"
    try:
        demonstrator = family.demonstrate(row, rng)
    except UserError:
        raise
    except Exception as error:
        raise PlayerError(f"{where} failed on row {row.get('id')}: {reason(error)}; fix demonstrate") from error
    if not callable(getattr(demonstrator, "act", None)):
        raise PlayerError(
            f"{where} returned {shown(demonstrator)} for row {row.get('id')}; return an object with act(observation), "
            "such as Recital(responses) of mtrl.environments.family"
        )

    def move(observation: str | None) -> str | None:
        try:
            return demonstrator.act(observation)
        except StopIteration:  # `act` reads from an iterator
            return None

    return move


def no_more_responses(row: Row, turns: int) -> str:
    """Return the sentence about a demonstrator that has no response in an episode that is not over."""
    return f"the demonstrator of row {row.get('id')} has no more responses after {turns} turns"


REPEAT_LAST = "repeat its last response until the episode ends, as Recital(responses) of mtrl.environments.family does"
"""What to change in a demonstrator that has no more responses."""
