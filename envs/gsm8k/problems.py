"""Synthetic word problems: short enough for a tiny policy, with numbers too large for it to compute without a
calculator."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from envs.gsm8k.calculator import calculate
from mtrl.environments.config_values import check_count
from mtrl.errors import UserError

SMALL, MEDIUM, LARGE = (3, 9), (12, 98), (100, 999)
NAMES = (
    ("tom", "he"),
    ("sam", "he"),
    ("ben", "he"),
    ("leo", "he"),
    ("amy", "she"),
    ("eva", "she"),
    ("mia", "she"),
    ("zoe", "she"),
)
ITEMS = ("pens", "eggs", "cups", "maps", "hats", "figs", "toys", "nuts")
HELD_OUT = 8
"""Number of problems of which one is held out, on average, by a hash of its template and numbers."""
MAX_MISSES = 20_000
"""Maximum number of consecutive draws without a new problem, after which the templates count as exhausted."""


@dataclass(frozen=True)
class Template:
    """A story with numbers a, b, c, d. If `whole` is drawn, a = whole * b, so that a/b is an integer."""

    operations: int
    story: str
    expression: str
    ranges: dict[str, tuple[int, int]]


TEMPLATES = (
    Template(1, "{name} has {a} {item}. {he} finds {b} more. how many {item}?", "{a}+{b}", {"a": LARGE, "b": LARGE}),
    Template(1, "{name} has {a} {item}. {he} loses {b}. how many left?", "{a}-{b}", {"a": (500, 999), "b": (100, 499)}),
    Template(1, "{name} buys {a} boxes of {b} {item}. how many {item}?", "{a}*{b}", {"a": MEDIUM, "b": MEDIUM}),
    Template(1, "{name} shares {a} {item} with {b} friends. how many each?", "{a}/{b}", {"whole": MEDIUM, "b": MEDIUM}),
    Template(
        2, "{name} has {a} {item}. {he} buys {b} packs of {c}. how many {item}?", "{a}+{b}*{c}",
        {"a": MEDIUM, "b": SMALL, "c": MEDIUM},
    ),
    Template(
        2, "{name} has {a} {item}. {he} sells {b} bags of {c}. how many left?", "{a}-{b}*{c}",
        {"a": (600, 999), "b": SMALL, "c": (12, 60)},
    ),
    Template(
        2, "{name} buys {a} packs of {b} {item}. {he} loses {c}. how many left?", "{a}*{b}-{c}",
        {"a": SMALL, "b": (30, 98), "c": (12, 89)},
    ),
    Template(
        2, "{name} has {a} {item}. {he} finds {b} and loses {c}. how many left?", "{a}+{b}-{c}",
        {"a": LARGE, "b": MEDIUM, "c": MEDIUM},
    ),
    Template(
        2, "each day {name} makes {a} {item} and buys {b}. how many in {c} days?", "({a}+{b})*{c}",
        {"a": MEDIUM, "b": MEDIUM, "c": SMALL},
    ),
    Template(
        2, "each day {name} makes {a} {item} and sells {b}. how many left in {c} days?", "({a}-{b})*{c}",
        {"a": (50, 98), "b": (12, 49), "c": SMALL},
    ),
    Template(
        3, "{name} has {a} {item}. {he} buys {b} packs of {c} and loses {d}. how many left?", "{a}+{b}*{c}-{d}",
        {"a": (60, 98), "b": SMALL, "c": MEDIUM, "d": (12, 59)},
    ),
    Template(
        3, "{name} buys {a} packs of {b} {item} and {c} bags of {d}. how many {item}?", "{a}*{b}+{c}*{d}",
        {"a": SMALL, "b": MEDIUM, "c": SMALL, "d": MEDIUM},
    ),
)  # fmt: skip
MAX_OPERATIONS = max(template.operations for template in TEMPLATES)


@dataclass(frozen=True)
class Problem:
    """One word problem."""

    key: str
    """Template and numbers: problems that differ only in names count as the same problem for the held-out split."""
    question: str
    expression: str
    answer: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.key.encode()).digest()[0] % HELD_OUT == 0


def draw(rng: random.Random, templates: tuple[Template, ...]) -> Problem:
    """Draw a random problem."""
    template = rng.choice(templates)
    numbers = {name: rng.randint(*bounds) for name, bounds in template.ranges.items()}
    if "whole" in numbers:
        numbers["a"] = numbers.pop("whole") * numbers["b"]
    name, he = rng.choice(NAMES)
    expression = template.expression.format(**numbers)
    question = template.story.format(name=name, he=he, item=rng.choice(ITEMS), **numbers)
    return Problem(f"{TEMPLATES.index(template)}:{expression}", question, expression, calculate(expression))


def generate(train: int, test: int, seed: int, operations: int) -> tuple[list[Problem], list[Problem]]:
    """Generate `train` and `test` distinct problems with up to `operations` operations; no key is in both."""
    check_count("operations", operations, 1, MAX_OPERATIONS)
    templates = tuple(template for template in TEMPLATES if template.operations <= operations)
    rng = random.Random(f"gsm8k {seed}")
    problems: dict[bool, list[Problem]] = {False: [], True: []}
    wanted, seen, misses = {False: train, True: test}, set(), 0
    while any(len(problems[held_out]) < wanted[held_out] for held_out in (False, True)):
        problem = draw(rng, templates)
        side = problems[problem.held_out]
        if problem.key in seen or len(side) >= wanted[problem.held_out]:
            misses += 1
            if misses > MAX_MISSES:
                raise UserError(
                    f"data.synthetic_train_rows={train} with synthetic_test_rows={test} is more than the problems with "
                    f"operations={operations} allow; ask for fewer rows"
                )
            continue
        misses = 0
        seen.add(problem.key)
        side.append(problem)
    return problems[False], problems[True]
