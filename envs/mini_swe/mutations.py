"""Mutations of an expression on its syntax tree, which imitate typical human mistakes in one line of code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

ARITHMETIC: tuple[type[ast.operator], ...] = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
COMPARISONS: tuple[type[ast.cmpop], ...] = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
ORDERED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.Pow)
"""Operators whose operands cannot be swapped."""
LOOKALIKES: tuple[tuple[str, ...], ...] = (
    ("max", "min", "sum", "len"),
    ("any", "all"),
    ("sorted", "list"),
    ("upper", "lower", "title"),
    ("startswith", "endswith"),
)


@lru_cache(maxsize=1024)
def mutants(expression: str) -> tuple[str, ...]:
    """Return every expression that one mutation leads to, in a fixed order; some may be equivalent to the original."""
    tree = ast.parse(expression, mode="eval")
    found: dict[str, None] = {}
    for owner, field, index in list(_slots(tree)):
        held = getattr(owner, field)
        original = held if index is None else held[index]
        for changed in _changes(original):
            _put(owner, field, index, changed)
            found[ast.unparse(tree)] = None
            _put(owner, field, index, original)
    found.pop(ast.unparse(tree), None)
    return tuple(found)


def _slots(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Yield every position of an expression: owner, field and, in a list, index."""
    for owner in ast.walk(tree):
        for field, value in ast.iter_fields(owner):
            if isinstance(value, ast.expr):
                yield owner, field, None
            elif isinstance(value, list):
                yield from ((owner, field, n) for n, item in enumerate(value) if isinstance(item, ast.expr))


def _put(owner: ast.AST, field: str, index: int | None, value: ast.expr) -> None:
    if index is None:
        setattr(owner, field, value)
    else:
        getattr(owner, field)[index] = value


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the mistaken variants of an expression."""
    match node:
        case ast.BinOp(left, operator, right):
            yield from (ast.BinOp(left, other(), right) for other in ARITHMETIC if not isinstance(operator, other))
            if isinstance(operator, ORDERED):
                yield ast.BinOp(right, operator, left)
        case ast.Compare(left, [ast.In()], [right]):
            yield ast.Compare(left, [ast.NotIn()], [right])
            yield ast.Compare(right, [ast.In()], [left])
        case ast.Compare(left, [operator], [right]):
            yield from (ast.Compare(left, [o()], [right]) for o in COMPARISONS if not isinstance(operator, o))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield ast.BoolOp(other, values)
            yield ast.UnaryOp(ast.Not(), node)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(value) if type(value) is int:
            yield from (ast.Constant(near) for near in (value + 1, value - 1) if near >= 0)
        case ast.Call(ast.Name(name), values):
            yield from (ast.Call(ast.Name(other), values, []) for other in _lookalikes(name))
        case ast.Call(ast.Attribute(value, name), values):
            yield from (ast.Call(ast.Attribute(value, other), values, []) for other in _lookalikes(name))
        case ast.ListComp(element, [ast.comprehension(target, source, [_], _)]):
            yield ast.ListComp(element, [ast.comprehension(target, source, [], 0)])
        case ast.Slice(lower, upper, None) if (lower is None) != (upper is None):
            yield ast.Slice(upper, lower)
        case ast.Name(name) if name in ("p", "q"):
            yield ast.UnaryOp(ast.Not(), node)


def _lookalikes(name: str) -> list[str]:
    return [other for group in LOOKALIKES if name in group for other in group if other != name]
