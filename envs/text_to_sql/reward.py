"""The reward of an episode, and the comparison of two results."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mtrl.errors import UserError
from mtrl.sandbox.alterations import alterations
from mtrl.sandbox.sql import SqlResult, SqlSandbox

SCHEMES = ("default", "skyrl")
MALFORMED = -0.1
MOST_MALFORMED = 5
"""Maximum number of malformed turns with a cost, so that the total reward of an episode is at least -0.5."""

_VALUES, _ZEROS, _MORE = 3, 2, 1
"""Weights of the changes that altered content makes to gold's result: new rows, new rows of only 0 and NULL, and more
of the same rows."""

_LITERALS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/""", re.DOTALL)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"")
_NUMBERS = re.compile(r"\b\d+(?:\.\d+)?\b")
_OTHER_TAGS = re.compile(r"</?(?:think|sql|observation)>")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a submitted query."""

    executed: bool
    correct: bool


def judge(sandbox: SqlSandbox, query: str, gold_sql: str) -> Verdict:
    """Run a submitted query and the gold query on the same database.

    Raises:
        UserError: the gold query itself does not run, so the row cannot be solved.
    """
    gold = sandbox.run(gold_sql)
    if gold.error or gold.truncated:
        reason = gold.error or "its result is too large to compare"
        raise UserError(f"ground_truth.sql={gold_sql[:80]!r} cannot be run ({reason}); correct the row or leave it out")
    answer = sandbox.run(query)
    correct = same_result(answer, gold, is_ordered(gold_sql)) and reads_content(sandbox, query, gold_sql, gold)
    return Verdict(executed=answer.error is None, correct=correct)


def reads_content(sandbox: SqlSandbox, query: str, gold_sql: str, gold: SqlResult) -> bool:
    """Whether a right result depends on the content of the database, and is no constant that happens to be right.

    The query runs on databases with altered content on which gold returns new rows, until its result equals gold's on
    one of them. Rows of only 0 and NULL, which aggregates over no rows return, count only if gold returns no other new
    rows; more of the same rows count only if gold never returns new rows. If the result of gold never changes, the
    check is undecidable: a result with rows counts as right, and an empty one does not, since any false condition gives
    an empty result. A query with the exact text of gold needs no altered database.

    A query may be slow on altered content alone. When it has taken twice the instructions, or the wall time, that one
    query may take, it runs no more, and follows none of the databases that are left.
    """
    if query.strip() == gold_sql.strip():
        return True
    known, weights, followed = set(gold.rows), set(), set()
    operations, seconds = 0, 0.0
    literals = sorted({quoted[1:-1] for quoted in _QUOTED.findall(gold_sql)} | set(_NUMBERS.findall(gold_sql)))
    for altered in alterations(sandbox, gold.tables, literals):
        with closing(altered):
            wanted = altered.run(gold_sql)
            if wanted.error or wanted.truncated:
                continue
            weight = _weight(wanted.rows, gold.rows, known)
            weights.add(weight)
            if not weight or operations > 2 * sandbox.limits.operations or seconds > sandbox.limits.seconds:
                continue
            found = altered.run(query)
            operations, seconds = operations + found.operations, seconds + found.seconds
            if same_result(found, wanted, ordered=False):
                followed.add(weight)
        if _VALUES in followed:
            return True
    strongest = max(weights, default=0)
    return strongest in followed if strongest else bool(gold.rows)


def _weight(rows: list[tuple[Any, ...]], gold: list[tuple[Any, ...]], known: set[tuple[Any, ...]]) -> int:
    """Return the weight of gold's `rows` on altered content: `_VALUES`, `_ZEROS`, `_MORE`, or 0 if they have no new row
    and are not more than before."""
    if not set(rows) <= known:
        return _VALUES if any(value for row in rows for value in row) else _ZEROS
    return _MORE if len(rows) > len(gold) else 0


def same_result(answer: SqlResult, gold: SqlResult, ordered: bool) -> bool:
    """Whether two results have the same number and order of columns, and the same rows with their duplicates, in the
    same order if the gold query sorts.

    An answer must read a table that gold reads; `reads_content` is stricter. Two empty results are the same only if
    both queries read the same tables, because any false condition gives an empty result.
    """
    if answer.error or answer.truncated or len(answer.columns) != len(gold.columns):
        return False
    if not gold.rows:
        return not answer.rows and answer.tables == gold.tables
    if gold.tables and not answer.tables & gold.tables:
        return False
    found, wanted = ([tuple(map(_rounded, row)) for row in result.rows] for result in (answer, gold))
    return found == wanted if ordered else Counter(found) == Counter(wanted)


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY."""
    text, nested = _LITERALS.sub(" ", sql), 1
    while nested:
        text, nested = re.subn(r"\([^()]*\)", " ", text)
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None


def _rounded(value: Any) -> Any:
    """Round a float to ten significant digits, because sums in another order differ in the last digits."""
    return float(f"{value:.9e}") if isinstance(value, float) else value


class EpisodeReward:
    """Computes the rewards of the turns of one episode.

    - `default`: 1.0 for a correct solution; -0.1 for each of the first five malformed turns.
    - `skyrl`: only at the end: 1.0 if correct, 0.0 if wrong, -1.0 if the episode violates SkyRL's format.
    """

    def __init__(self, scheme: str):
        if scheme not in SCHEMES:
            raise UserError(f"reward.scheme={scheme} is not known to text_to_sql; choose one of {', '.join(SCHEMES)}")
        self.scheme = scheme
        self.malformed_turns = 0
        self.history = ""

    def components(self, response: str, kind: str | None, correct: bool, done: bool) -> dict[str, float]:
        """Return the components of this turn's reward, which is their sum. `kind` is sql, solution or None
        (malformed)."""
        self.history += response + ("<observation></observation>" if kind == "sql" and not done else "\n")
        if self.scheme == "skyrl":
            valid = not done or is_well_formatted(self.history)
            return {"correct": float(correct and valid), "malformed": 0.0 if valid else -1.0}
        self.malformed_turns += kind is None
        costs = kind is None and self.malformed_turns <= MOST_MALFORMED
        return {"correct": float(correct), "malformed": MALFORMED if costs else 0.0}


def is_well_formatted(history: str) -> bool:
    """Whether the episode follows SkyRL's format: one solution without other tags in it, some thinking, and thinking
    after every observation."""
    if history.count("<solution>") != 1 or history.count("</solution>") != 1:
        return False
    solution = history.partition("<solution>")[2].partition("</solution>")[0]
    if _OTHER_TAGS.search(solution) or "</think>" not in history.partition("<think>")[2]:
        return False
    return all(rest.lstrip().startswith("<think>") for rest in history.split("</observation>")[1:])
