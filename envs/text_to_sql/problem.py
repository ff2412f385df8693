"""Generated problems: a question in plain words about one small table, whose names and spelling the question hides.

For example, the question is `highest price if red`, the table is called `depot`, its columns are `fee hue label qty` in
a shuffled order, and it stores `RED`. The names in the question never occur in a table, so a guess without a query is
never right. Queries of the table's name and of one row reveal everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TABLES = ("shop", "depot", "store", "market", "cellar", "attic", "shelf", "barn", "stall", "pantry", "cabin", "vault")
NAMES = {
    "item": ("kind", "label", "title"),
    "price": ("cost", "fee", "rate"),
    "stock": ("qty", "amount", "units"),
    "color": ("hue", "shade", "tint"),
    "size": ("scale", "fit", "form"),
    "stuff": ("matter", "base", "fabric"),
}
"""Possible column names in tables, by the column's name in questions."""
WORDS = {
    "item": ("cup", "hat", "bag", "box", "pen", "toy", "mug", "rug"),
    "color": ("red", "blue", "green", "pink", "gold", "white"),
    "size": ("small", "large", "tall", "wide"),
    "stuff": ("wood", "iron", "glass", "silk"),
}
"""Text values of each column, as questions spell them; their first two letters are distinct."""
SPELLINGS = {"lower": str.lower, "upper": str.upper, "short": lambda word: f"{word[:2]}."}
MEASURES = ("price", "stock")
CATEGORIES = ("color", "size", "stuff")
QUESTIONS = {
    "count": "how many are {word}",
    "highest": "highest {measure} if {word}",
    "lowest": "lowest {measure} if {word}",
    "total": "total {measure} if {word}",
    "items": "which are {word}",
    "sorted": "which are {word} by {measure}",
}
RESULTS = {
    "count": "count(*)",
    "highest": "max({measure})",
    "lowest": "min({measure})",
    "total": "sum({measure})",
    "items": "{item}",
    "sorted": "{item}",
}
NAMED_SHARE = 0.5
"""Share of questions that name the table, so that one query is enough; the other questions need two."""
ROWS = 8
GROUPS = ((2, 2, 4), (2, 3, 3))
"""Numbers of rows of the words of a table. The word of the question has each of them with equal probability, so that a
query which ignores the word, such as one about the largest group, is seldom right."""
OTHER_GROUPS = {"count": ((1, 2, 5), (1, 3, 4), *GROUPS), "sorted": ((3, 5), (4, 4))}
"""`GROUPS` of some questions: `count` would else be 2 for half of them, and two rows are often in order by chance."""

Cells = dict[str, str | int]
"""One row of a table: value by the column's name in questions."""


@dataclass(frozen=True)
class Problem:
    """A question with the names and spelling that answer it; the table's contents are drawn separately."""

    ask: str
    measure: str
    category: str
    word: str
    spelling: str
    table: str
    named: bool
    columns: dict[str, str]
    """Stored name of each column, by its name in questions, in stored order."""

    @property
    def question(self) -> str:
        question = QUESTIONS[self.ask].format(measure=self.measure, word=self.word)
        return f"{question} in {self.table}" if self.named else question

    @property
    def sql(self) -> str:
        """The query that answers the question. It identifies the problem, so splits never share a query."""
        result = RESULTS[self.ask].format(measure=self.columns[self.measure], item=self.columns["item"])
        order = f" order by {self.columns[self.measure]}" if self.ask == "sorted" else ""
        condition = f"{self.columns[self.category]} = '{self.spell(self.word)}'"
        return f"select {result} from {self.table} where {condition}{order}"

    def spell(self, word: str) -> str:
        """Return `word` as the table stores it."""
        return SPELLINGS[self.spelling](word)

    def script(self, rows: list[Cells]) -> str:
        """Return the statements that create the table."""
        kinds = {name: "integer" if kind in MEASURES else "text" for kind, name in self.columns.items()}
        columns = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        values = ", ".join(f"({', '.join(self._literal(row[kind]) for kind in self.columns)})" for row in rows)
        return f"create table {self.table} ({columns}); insert into {self.table} values {values};"

    def _literal(self, value: str | int) -> str:
        return f"'{self.spell(value)}'" if isinstance(value, str) else str(value)


def draw(rng: random.Random) -> Problem:
    """Draw a random problem."""
    category = rng.choice(CATEGORIES)
    kinds = ["item", *MEASURES, category]
    rng.shuffle(kinds)
    return Problem(
        ask=rng.choice(list(QUESTIONS)),
        measure=rng.choice(MEASURES),
        category=category,
        word=rng.choice(WORDS[category]),
        spelling=rng.choice(list(SPELLINGS)),
        table=rng.choice(TABLES),
        named=rng.random() < NAMED_SHARE,
        columns={kind: rng.choice(NAMES[kind]) for kind in kinds},
    )


def fill(problem: Problem, rng: random.Random) -> list[Cells]:
    """Draw rows with two or three words, of which one matches the condition, until a query without the condition, the
    order or the right column gives another result."""
    sizes = list(rng.choice(OTHER_GROUPS.get(problem.ask, GROUPS)))
    rng.shuffle(sizes)
    others = rng.sample([word for word in WORDS[problem.category] if word != problem.word], len(sizes) - 1)
    words = [word for word, size in zip([problem.word, *others], sizes, strict=True) for _ in range(size)]
    while True:
        rows = _draw_rows(problem, words, rng)
        if _has_one_solution(problem, rows):
            return rows


def _draw_rows(problem: Problem, words: list[str], rng: random.Random) -> list[Cells]:
    words = rng.sample(words, ROWS)
    items = rng.sample(WORDS["item"], ROWS)
    # All values of a measure differ, so that sorting has a single right order, and no price equals a stock.
    prices, stocks = rng.sample(range(10, 100), ROWS), rng.sample(range(1, 10), ROWS)
    return [
        {"item": item, "price": price, "stock": stock, problem.category: word}
        for item, price, stock, word in zip(items, prices, stocks, words, strict=True)
    ]


def _has_one_solution(problem: Problem, rows: list[Cells]) -> bool:
    """Whether a query without the condition, the order or the right column would give another result."""
    matching = [row for row in rows if row[problem.category] == problem.word]
    if problem.ask in ("highest", "lowest"):
        pick = max if problem.ask == "highest" else min
        return pick(row[problem.measure] for row in rows) != pick(row[problem.measure] for row in matching)
    if problem.ask == "sorted":
        by_price, by_stock = (sorted(matching, key=lambda row: row[measure]) for measure in MEASURES)
        return by_price != by_stock and matching not in (by_price, by_stock)
    return True
