"""The functions of generated repositories: one expression each, and calls that separate it from its mutants."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

FOLDER = "toolbox"
PLACES = {"a": "numbers", "b": "numbers", "p": "logic", "q": "logic", "s": "text", "t": "text", "xs": "lists"}
"""Module of the functions of each kind, by the name of their parameter."""
NAMINGS: dict[str, list[dict[str, str]]] = {
    "numbers": [{"a": a, "b": b} for a, b in ("ab", "xy", "mn", "ij", "uv", "cd")],
    "logic": [{"p": p, "q": q} for p, q in ("pq", "ab", "xy", "mn", "uv", "cd")],
    "text": [
        {"s": s, "t": t}
        for s, t in (("s", "t"), ("text", "part"), ("word", "piece"), ("line", "bit"), ("name", "key"), ("u", "v"))
    ],
    "lists": [{"xs": name} for name in ("xs", "items", "values", "data", "ys", "entries")],
}
"""Possible names of the parameters; the model can only learn them from the file."""

_FIXED = {
    "add": "a + b",
    "subtract": "a - b",
    "multiply": "a * b",
    "divide": "a // b",
    "remainder": "a % b",
    "power": "a ** b",
    "less": "a < b",
    "at_most": "a <= b",
    "more": "a > b",
    "at_least": "a >= b",
    "same": "a == b",
    "differ": "a != b",
    "larger": "max(a, b)",
    "smaller": "min(a, b)",
    "gap": "abs(a - b)",
    "average": "(a + b) // 2",
    "border": "2 * (a + b)",
    "double": "a * 2",
    "half": "a // 2",
    "square": "a * a",
    "cube": "a ** 3",
    "successor": "a + 1",
    "predecessor": "a - 1",
    "negate": "-a",
    "even": "a % 2 == 0",
    "odd": "a % 2 == 1",
    "positive": "a > 0",
    "negative": "a < 0",
    "zero": "a == 0",
    "last_digit": "a % 10",
    "both": "p and q",
    "either": "p or q",
    "neither": "not (p or q)",
    "opposite": "not p",
    "unless": "p and not q",
    "initial": "s[0]",
    "final": "s[-1]",
    "loud": "s.upper()",
    "quiet": "s.lower()",
    "join": "s + t",
    "twice": "s * 2",
    "size": "len(s)",
    "starts": "s.startswith(t)",
    "ends": "s.endswith(t)",
    "contains": "t in s",
    "reversed_text": "s[::-1]",
    "total": "sum(xs)",
    "largest": "max(xs)",
    "smallest": "min(xs)",
    "count": "len(xs)",
    "head": "xs[0]",
    "last": "xs[-1]",
    "rest": "xs[1:]",
    "ascending": "sorted(xs)",
    "span": "max(xs) - min(xs)",
    "mean": "sum(xs) // len(xs)",
    "positives": "[x for x in xs if x > 0]",
    "negatives": "[x for x in xs if x < 0]",
    "evens": "[x for x in xs if x % 2 == 0]",
    "odds": "[x for x in xs if x % 2 == 1]",
    "doubled": "[x * 2 for x in xs]",
    "squares": "[x * x for x in xs]",
    "any_positive": "any(x > 0 for x in xs)",
    "all_positive": "all(x > 0 for x in xs)",
}
_WITH_NUMBER = {
    "plus{n}": "a + {n}",
    "minus{n}": "a - {n}",
    "times{n}": "a * {n}",
    "over{n}": "a // {n}",
    "modulo{n}": "a % {n}",
    "above{n}": "a > {n}",
    "below{n}": "a < {n}",
    "first{n}": "xs[:{n}]",
    "after{n}": "xs[{n}:]",
}
NUMBERS = range(3, 9)
LENGTHS = range(1, 5)

EXPRESSIONS = _FIXED | {
    name.format(n=n): expression.format(n=n)
    for name, expression in _WITH_NUMBER.items()
    for n in (LENGTHS if "xs" in expression else NUMBERS)
}
"""Returned expression by name of the function."""

_PAIRS = [(7, 2), (3, 5), (9, 4), (6, 6), (8, 3), (5, 1), (2, 9), (1, 2)]
_LISTS = [[3, 1, 2], [5], [4, -2, 7, 1], [-3, -1], [2, 2, 6], [0, 9, 1, 8, 3, 7]]
_WORDS = [("hello", "he"), ("hello", "lo"), ("Cat", "dog"), ("abc", "b"), ("NO", "no"), ("x", "x")]
_TRUTHS = [(p, q) for p in (False, True) for q in (False, True)]


@dataclass(frozen=True)
class Function:
    """One function, correct or broken: its name, its parameters as named in the file, and the returned expression."""

    name: str
    parameters: tuple[str, ...]
    expression: str

    @property
    def signature(self) -> str:
        return f"def {self.name}({', '.join(self.parameters)}):"


def parameters(expression: str) -> tuple[str, ...]:
    """Return the parameters of an expression of the table, in alphabetical order."""
    names = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    return tuple(sorted(names & PLACES.keys()))


def place(name: str) -> str:
    """Return the module of a function."""
    return PLACES[parameters(EXPRESSIONS[name])[0]]


def arguments(name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of the hidden calls, which are chosen to separate the function from its mutants."""
    names = parameters(EXPRESSIONS[name])
    if names[0] == "xs":
        return [(numbers,) for numbers in _LISTS]
    pairs: list[tuple[Any, ...]] = {"a": _PAIRS, "p": _TRUTHS, "s": _WORDS}[names[0]]  # type: ignore[assignment]
    if len(names) == 2:
        return pairs
    if names[0] == "a":
        number = int(digits) if (digits := "".join(filter(str.isdigit, name))) else 2
        near = [number - 1, number, number + 1, 3 * number, 3 * number + 1]
        return [(value,) for value in dict.fromkeys([0, 1, -1, 12, 25, *near])]
    return [(first,) for first in dict.fromkeys(first for first, _ in pairs)]


def make(name: str, expression: str, naming: Mapping[str, str]) -> Function:
    """Build the function `name` with `expression` (of the table or a mutant) and renamed parameters."""
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = naming.get(node.id, node.id)
    shown = tuple(naming[parameter] for parameter in parameters(EXPRESSIONS[name]))
    return Function(name, shown, ast.unparse(tree))


def results(name: str) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the hidden calls of a function: arguments and expected results."""
    function = _compiled(name, EXPRESSIONS[name])
    return [(values, function(*values)) for values in arguments(name)]


@lru_cache(maxsize=4096)
def outcomes(name: str, expression: str) -> tuple[str, ...]:
    """Return the result of each hidden call as its `repr`, or the class name of the exception that it raises.

    Use this only for expressions of the table and their mutants, because they are evaluated in this process.
    """
    function = _compiled(name, expression)
    given = []
    for values in arguments(name):
        try:
            given.append(repr(function(*values)))
        except Exception as error:
            given.append(type(error).__name__)
    return tuple(given)


def _compiled(name: str, expression: str) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(parameters(EXPRESSIONS[name]))}: {expression}", {})
