"""Mastermind: find a code of digits; every place of a guess is marked."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from envs.games.outcome import Outcome
from mtrl.errors import UserError

SEPARATORS = " ,\t\n"
"""Characters that may separate the digits of a guess."""
DIGITS = "0123456789"


@dataclass(frozen=True)
class Mastermind:
    """One code and the digits that it may consist of. The game has no state: a guess always gets the same marks."""

    code: str
    symbols: str

    @classmethod
    def from_truth(cls, truth: dict[str, Any]) -> Mastermind:
        """Build the game from a row's `ground_truth`.

        Raises:
            UserError: the code is missing, or no guess can match it.
        """
        code, symbols = (value if isinstance(value, str) else "" for value in map(truth.get, ("code", "symbols")))
        if not code or not set(code) <= set(symbols) <= set(DIGITS):
            raise UserError(
                f"ground_truth={truth} is no mastermind row; write the code and the digits that it may be made of, "
                "such as {'game': 'mastermind', 'code': '772', 'symbols': '2578'}"
            )
        return cls(code, symbols)

    @property
    def opening(self) -> str:
        """Text of the information before the first guess."""
        return f"code of {len(self.code)} from {self.symbols}"

    def play(self, move: str) -> Outcome | None:
        """Mark a guess; None if the move is not a valid guess."""
        guess = "".join(character for character in move if character not in SEPARATORS)
        if len(guess) != len(self.code) or not set(guess) <= set(self.symbols):
            return None
        marked = marks(guess, self.code)
        return Outcome(marked, marked.count("+") / len(self.code))


def marks(guess: str, code: str) -> str:
    """Return one mark per place: `+` (the digit is right), `~` (another place has it) or `-` (it is not in the
    code)."""
    pairs = zip(guess, code, strict=True)
    return "".join("+" if digit == right else "~" if digit in code else "-" for digit, right in pairs)


def consistent(places: int, symbols: str, history: list[tuple[str, str]]) -> list[str]:
    """Return the codes that are consistent with the `(guess, marks)` pairs of `history`, in order."""
    codes = map("".join, product(symbols, repeat=places))
    return [code for code in codes if all(marks(guess, code) == seen for guess, seen in history)]


def solve(game: Mastermind) -> list[str]:
    """Return the guesses of a player that does not know the code and always guesses the first consistent code."""
    history: list[tuple[str, str]] = []
    while not history or history[-1][0] != game.code:
        guess = consistent(len(game.code), game.symbols, history)[0]
        history.append((guess, marks(guess, game.code)))
    return [guess for guess, _ in history]


def draw(rng: random.Random, places: int, symbols: int) -> dict[str, Any]:
    """Draw the `ground_truth` of a new row. The digits of the code are consecutive, with 0 after 9."""
    first = rng.randrange(len(DIGITS)) if symbols < len(DIGITS) else 0  # all ten digits are the same set anyway
    shown = (DIGITS + DIGITS)[first : first + symbols]
    return {"game": "mastermind", "code": "".join(rng.choices(shown, k=places)), "symbols": shown}
