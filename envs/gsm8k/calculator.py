"""A calculator that is safe for model input: it accepts only numbers, + - * / and parentheses."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

MAX_LENGTH = 200
"""Maximum length of an expression, in characters."""
MAX_DEPTH = 20
"""Maximum nesting depth of parentheses and signs."""
MAX_DIGITS = 30
"""Maximum number of digits of a number, read or computed."""
SIGNIFICANT_DIGITS = 10
"""Number of digits to print of a result that is not an integer."""

_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)|([-+*/()]))")


class CalculatorError(ValueError):
    """An expression without a value; the model reads the text of this error."""


def calculate(expression: str) -> str:
    """Return the value of `expression` as text: `12+3*7` gives `33`, `10/4` gives `2.5`.

    Raises:
        CalculatorError: the expression is malformed, too large, or divides by zero.
    """
    return _print(_Parser(_tokens(expression)).value())


def _tokens(expression: str) -> list[str]:
    expression = expression.strip()
    if len(expression) > MAX_LENGTH:
        raise CalculatorError("expression too long")
    tokens, position = [], 0
    while position < len(expression):
        match = _TOKEN.match(expression, position)
        if not match:
            raise CalculatorError(f"unexpected {expression[position:].lstrip()[:1]}")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise CalculatorError("number too large")
    return value


def _print(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=SIGNIFICANT_DIGITS, rounding=ROUND_HALF_EVEN)
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    text = f"{quotient:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Parser:
    """Recursive descent with exact fractions, so that 0.1+0.2 is 0.3.

    sum = product (("+" | "-") product)*
    product = atom (("*" | "/") atom)*
    atom = number | sign atom | "(" sum ")"
    """

    def __init__(self, tokens: list[str]):
        self.tokens = [*tokens, ""]  # "" marks the end
        self.position = 0

    def value(self) -> Fraction:
        result = self._sum(0)
        if self._peek():
            raise CalculatorError(f"unexpected {self._peek()}")
        return result

    def _peek(self) -> str:
        return self.tokens[self.position]

    def _next(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def _sum(self, depth: int) -> Fraction:
        total = self._product(depth)
        while self._peek() in ("+", "-"):
            sign = 1 if self._next() == "+" else -1
            total = _bounded(total + sign * self._product(depth))
        return total

    def _product(self, depth: int) -> Fraction:
        total = self._atom(depth)
        while self._peek() in ("*", "/"):
            multiply = self._next() == "*"
            factor = self._atom(depth)
            if not multiply and factor == 0:
                raise CalculatorError("division by zero")
            total = _bounded(total * factor if multiply else total / factor)
        return total

    def _atom(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError("nested too deep")
        token = self._next() if self._peek() else ""
        if token in ("+", "-"):
            value = self._atom(depth + 1)
            return value if token == "+" else -value
        if token == "(":
            value = self._sum(depth + 1)
            if self._peek() != ")":
                raise CalculatorError("missing )")
            self._next()
            return value
        if token[:1].isdigit() or token[:1] == ".":
            return _bounded(Fraction(token))
        raise CalculatorError(f"unexpected {token}" if token else "incomplete expression")
