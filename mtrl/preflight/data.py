"""Checks of the rows: held-out rows are no training rows, the turns suffice, and the batch size fits. Only gold
episodes run."""

from __future__ import annotations

import math
from collections.abc import Callable

from mtrl.datasets import contents_of
from mtrl.preflight.context import CheckContext, at_most, fingerprint
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.types import Row

MARGIN = 1.5
"""Factor of the advised limit: max_turns = ceil(MARGIN x N) for a task that a skilled human solves in N turns."""
QUANTILE = 0.95
"""Share of gold's episodes for which N turns suffice."""
GENEROUS = 3
"""Multiple of the advised limit above which the check warns: contexts get long and expensive."""
Problem = Callable[[Row], tuple[str, str]]
DUPLICATES = 0.05
"""Share of repeated training rows above which the check warns."""
ENOUGH = 100
"""Advised number of rows of an evaluation, which shows success to ±10 points."""


def splits(context: CheckContext) -> CheckResult:
    """Check that no held-out row is a training row, by id or by prompt and ground truth. Rows of the validation split,
    on which the run evaluates, count as held out."""
    train, test, validation = context.splits.train, context.splits.test, context.splits.validation
    if not train or not test:
        return failed(
            f"{len(train)} training rows, {len(test)} held out",
            "give both splits rows: data.train_split, data.test_split",
        )
    problem = _problem_by(train, [*validation, *test])
    held_out = [*validation, *test]
    held_ids, held = {str(row["id"]) for row in held_out}, {problem(row) for row in held_out}
    shared_ids = [str(row["id"]) for row in train if str(row["id"]) in held_ids]
    shared = [str(row["id"]) for row in train if problem(row) in held]
    cut = f", {len(validation)} for the run's evaluations" if validation else ""
    evidence = f"{len(train)} training rows{cut}, {len(test)} held out"
    if shared_ids or shared:
        kinds = {"id": shared_ids, "prompt and ground truth": shared}
        shared_by = [f"{len(ids)} share {kind} ({at_most(ids)})" for kind, ids in kinds.items() if ids]
        return failed(
            f"{evidence}: {'; '.join(shared_by)}",
            "split by the problem, not by the row, and drop from the training rows what is held out",
            shared_by,
        )
    return _repeated(evidence, train, held_out, problem)


def _repeated(evidence: str, train: list[Row], held_out: list[Row], problem: Problem) -> CheckResult:
    """Return the verdict on contradictory and repeated rows."""
    prompts = {text for row in train for text in [_prompt(row)]}
    shared = [str(row["id"]) for row in held_out if _prompt(row) in prompts]
    twice, again = (len(rows) - len({problem(row) for row in rows}) for rows in (train, held_out))
    if shared and len(prompts) == len(train):  # each prompt names its problem, but one prompt has two ground truths
        return warned(
            f"{evidence}: {len(shared)} held-out prompts are training prompts with another ground truth "
            f"({at_most(shared)})",
            "correct the ground truths, or drop these rows from the training split",
        )
    if again or twice > DUPLICATES * len(train):
        return warned(
            f"{evidence}: {twice} training rows and {again} held-out rows occur before",
            "drop repeated rows: they count twice in every mean",
        )
    asked = f"; {len(shared)} prompts occur in both, for other problems" if shared else ""
    repeated = f"; {twice} training rows are repeated" if twice else ""
    return passed(f"{evidence}: disjoint by id, and by prompt and truth{asked}{repeated}")


def turns(context: CheckContext) -> CheckResult:
    """Check that `generator.max_turns` is about ceil(1.5 x N), where N is the number of turns that gold needs."""
    if context.family.gold is None or not context.gold:
        return skipped(str(context.needs_gold()))
    lengths = sorted(len(responses) for _, responses in context.gold_responses)
    needed = lengths[math.ceil(QUANTILE * len(lengths)) - 1]
    allowed, advised = context.config.generator.max_turns, math.ceil(MARGIN * needed)
    evidence = f"gold needs {lengths[0]} to {lengths[-1]} turns (95 %: {needed}); generator.max_turns={allowed}"
    if lengths[-1] > allowed:
        short = sum(length > allowed for length in lengths)
        return failed(
            f"{evidence}: {short} of {len(lengths)} rows cannot be solved", f"set generator.max_turns={advised}"
        )
    if allowed < advised and allowed > 1:
        return warned(f"{evidence}, less than ceil(1.5 x {needed}) = {advised}", f"set generator.max_turns={advised}")
    if allowed > GENEROUS * advised:
        return warned(
            f"{evidence}, far more than ceil(1.5 x {needed}) = {advised}", f"set generator.max_turns={advised}"
        )
    return passed(f"{evidence}, ceil(1.5 x {needed}) = {advised}" + ("" if allowed > 1 else ": single-turn"))


def batch(context: CheckContext) -> CheckResult:
    """Check that a step has distinct prompts, and that the run's evaluations have enough rows to resolve a
    difference."""
    config, train = context.config, context.splits.train
    if not train:
        return skipped("there are no training rows")
    per_step, group = config.trainer.prompts_per_step, config.algorithm.group_size
    passes = config.trainer.max_steps * per_step / max(len(train), 1)
    evaluated = min(len(context.splits.held_out), config.evaluation.rows)
    evidence = (
        f"{per_step} prompts x {group} = {per_step * group} episodes per step; {passes:.1f} passes over "
        f"{len(train)} rows; {evaluated} evaluated"
    )
    if len(train) < per_step:
        return warned(
            f"{evidence}: a step repeats prompts", f"set trainer.prompts_per_step={len(train)} or less, or add rows"
        )
    if evaluated and 1.96 * math.sqrt(0.25 / evaluated) > 0.2:
        margin = 100 * 1.96 * math.sqrt(0.25 / evaluated)
        return warned(
            f"{evidence}: success is known to ±{margin:.0f} points only",
            f"evaluate {ENOUGH} rows or more: {', '.join(_limits_of_rows(context))}",
        )
    return passed(evidence)


def _limits_of_rows(context: CheckContext) -> list[str]:
    """Return the keys that keep the run's evaluations below `ENOUGH` rows."""
    config, splits = context.config, context.splits
    keys = ["evaluation.rows"] * (config.evaluation.rows < ENOUGH)
    if len(splits.held_out) < ENOUGH and splits.validation:
        return [*keys, "data.validation_rows"]
    if len(splits.held_out) < ENOUGH:
        return [*keys, "data.max_test_rows", *["data.synthetic_test_rows"] * (config.data.path is None)]
    return keys


def _prompt(row: Row) -> str:
    """Return the text of the prompt with case and whitespace normalised."""
    return " ".join(" ".join(str(m.get("content") or "") for m in row["prompt"]).casefold().split())


def _problem_by(train: list[Row], held_out: list[Row]) -> Problem:
    """Return the function that identifies a row's problem: by the text of its task (`contents_of`), as in the split of
    the data, and its ground truth."""
    contents = contents_of(train, held_out, _prompt)
    of_row = {id(row): content for row, content in zip([*train, *held_out], contents, strict=True)}
    return lambda row: (of_row[id(row)], fingerprint(row["ground_truth"]))
