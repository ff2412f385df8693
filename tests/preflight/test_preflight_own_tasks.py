"""Sound tasks of a user's own that differ from the shipped ones: the checklist finds nothing wrong with them."""

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import count
from types import SimpleNamespace

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.factory import load_task
from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.context import CheckContext
from mtrl.preflight.result import Status
from tests.preflight.broken import sound

SUBMIT = "<submit>done</submit>"


class Raising(sound.Lookup):
    """Raises an error for one response, which no model samples."""

    def step(self, response, ground_truth):
        if response == "unreadable patch":
            raise RuntimeError("the patch does not apply")
        return super().step(response, ground_truth)


class Submitting(BaseEnvironment):
    """The work is done in one turn and submitted in the next one, whose response is the same for all rows."""

    def reset(self, row):
        self.word = None

    def step(self, response, ground_truth):
        self.current_turn += 1
        if response.startswith("<do>"):
            self.word = response.removeprefix("<do>").removesuffix("</do>")
        done = SUBMIT in response
        return StepResult(float(done and self.word == ground_truth["word"]), "done", done or self.current_turn >= 5)


class Dug(sound.Lookup):
    """Raises an error for every response on a broken row, and in one task on any row."""

    breaks_anyway = False

    def reset(self, row):
        if row["id"] in DUG:
            raise UserError(f"row {row['id']} has a table that cannot be read")
        return super().reset(row)

    def step(self, response, ground_truth):
        if self.breaks_anyway and not response:
            raise ValueError("an empty response")
        return super().step(response, ground_truth)


class Seeded(BaseEnvironment):
    """The answer is a number that depends on the seed."""

    def reset(self, row):
        return [{"role": "user", "content": f"say {row['seed']}"}]

    def step(self, response, ground_truth):
        return StepResult(1.0, None, done=True)


def broken_rows(row):
    wrong = {"train-0": ["unreadable patch"], "train-37": ["<final_output>1</final_output>"]}
    return wrong.get(row["id"]) or sound.gold(row)


DUG = {"train-0", "train-37"}


def told_between(opened, closed, data, seed, **config):
    splits = sound.load(data, seed)
    for row in (*splits.train, *splits.test):
        row["prompt"][0]["content"] += f"{opened}{row['ground_truth']['word']}{closed}"
    return splits


def two_truths(data, seed, **config):
    """All rows have one prompt; the seed determines the problem, and there are only two answers."""
    rows = [
        {"id": f"game-{n}", "prompt": [{"role": "user", "content": "Play"}], "ground_truth": {"won": n % 2}, "seed": n}
        for n in range(60)
    ]
    return Splits(rows[:40], rows[40:])


def three_splits(data, seed, **config):
    rows = [sound.make_row(n, "train") for n in range(120)]
    return Splits(rows[20:], [sound.make_row(n, "test") for n in range(120, 160)], rows[:20])


def shared_split(data, seed, **config):
    splits = three_splits(data, seed)
    return Splits([*splits.train, *({**row, "id": f"again-{row['id']}"} for row in splits.validation[:3])], splits.test,
                  splits.validation)  # fmt: skip


def wrong_row(row):
    return ["<final_output>1</final_output>"] if row["id"] == "train-7" else sound.gold(row)


def first_alone(row):
    if row["id"] != "train-0":
        raise UserError(f"row {row['id']} has no column patch; add one")
    return SUBMITTED.gold(row)


def unknown_row(row, *more):
    raise UserError(f"row {row['id']} has no column patch; add one")


def _seeded(data, seed, **config):
    rows = [{"id": f"game-{n}", "prompt": [], "ground_truth": {}, "seed": n} for n in range(60)]
    return Splits(rows[:40], rows[40:])


def _same_seeds(data, seed, **config):
    rows = [{"id": f"game-{n}", "prompt": [], "ground_truth": {}, "seed": n % 50} for n in range(60)]
    return Splits(rows[:40], rows[40:])


BROKEN_ROWS = replace(sound.FAMILY, environment=Raising, gold=broken_rows)
SUBMITTED = replace(
    sound.FAMILY,
    environment=Submitting,
    gold=lambda row: [f"<do>{row['ground_truth']['word']}</do>", SUBMIT],
    demonstrate=None,
    score=lambda trajectory, row: trajectory.reward,
)
FAMILY_OF_70 = sound.FAMILY
SUBMITTED_ONE = replace(SUBMITTED, gold=first_alone)
DUG_ROWS = replace(sound.FAMILY, environment=Dug)
DUG_AND_BROKEN = replace(sound.FAMILY, environment=type("DugAndBroken", (Dug,), {"breaks_anyway": True}))
QUOTING = replace(sound.FAMILY, load=partial(told_between, "<text>", "</text>"))
MISSPELT = replace(sound.FAMILY, load=partial(told_between, "<final_otuput>CODE</final_otuput>", ""))
TWO_TRUTHS = Family("two", Submitting, two_truths, lambda trajectory, row: trajectory.reward)
THREE_SPLITS = replace(sound.FAMILY, load=three_splits, gold=wrong_row)
SHARED_SPLIT = replace(sound.FAMILY, load=shared_split)
UNKNOWN = replace(sound.FAMILY, gold=unknown_row, demonstrate=unknown_row)
SEEDED = Family("seeded", Seeded, _seeded, lambda trajectory, row: trajectory.reward)
SAME_SEEDS = replace(SEEDED, load=_same_seeds)


@cache
def composed():
    target = f"environment.target={sound.__name__}.FAMILY"
    return OmegaConf.to_object(compose(["experiment=null", "environment.name=x", target, "generator.max_turns=5"]))


def result_of(family, check, seconds=30.0):
    """Return one line of the checklist, without new processes."""
    config = copy.deepcopy(composed())
    config.environment.target = f"{__name__}.{family}"
    task = load_task(config)
    context = CheckContext(config, task.family, task.splits, task.make_environment, 16, seconds)
    (result,) = run(context, [(check, CHECKS[check])])
    return result


def test_a_last_reply_that_only_hands_in_is_no_answer_to_be_stuffed():
    result = result_of("SUBMITTED", "stuffing")
    assert result.status == Status.SKIP and "alone solves none of these rows" in result.evidence
    one = result_of("SUBMITTED_ONE", "stuffing")
    assert one.status == Status.SKIP and one.evidence == result.evidence, "also where one row alone is solved"


def test_rows_that_differ_by_their_seed_are_different_problems():
    assert result_of("SEEDED", "splits").status == Status.PASS


def test_seeds_that_are_in_both_splits_are_found():
    result = result_of("SAME_SEEDS", "splits")
    assert result.status == Status.FAIL and "10 share prompt" in result.evidence


def test_gold_is_tried_on_every_row():
    """Rows 0 and 37 of 40 are broken, and the other checks run 16 rows."""
    result = result_of("BROKEN_ROWS", "gold")
    assert result.status == Status.FAIL and result.evidence.startswith("on 70 of 70 rows, gold fails on 2.")
    assert "the patch does not apply" in result.evidence and "train-37" in result.evidence


def test_a_broken_gold_row_is_no_matter_of_the_environments_robustness():
    assert result_of("BROKEN_ROWS", "robust").status == Status.PASS


def test_a_player_on_a_broken_row_is_no_matter_of_the_environments_robustness_either():
    """The demonstrator runs row 37, which is not among the first 16 rows of gold."""
    result = result_of("DUG_ROWS", "robust")
    assert result.status == Status.PASS, result.evidence
    broken = result_of("DUG_AND_BROKEN", "robust")
    assert broken.status == Status.FAIL and "ValueError" in broken.evidence and "UserError" not in broken.evidence
    gold = result_of("DUG_ROWS", "gold")
    assert gold.status == Status.FAIL and "gold fails on 2." in gold.evidence


def test_tags_around_a_text_of_the_row_are_no_form_of_the_answer():
    assert result_of("QUOTING", "prompt").status == Status.PASS
    result = result_of("MISSPELT", "prompt")
    assert result.status == Status.WARN and "<final_otuput>" in result.evidence and "<text>" not in result.evidence


def test_rows_with_other_seeds_and_two_ground_truths_are_different_problems():
    result = result_of("TWO_TRUTHS", "splits")
    assert result.status == Status.PASS and "20 prompts occur in both" in result.evidence


def test_validation_rows_are_checked_and_held_out():
    """Gold is wrong on row 7 of the validation rows, which is in neither of the other splits."""
    result = result_of("THREE_SPLITS", "gold")
    assert result.status == Status.FAIL and result.evidence.startswith("on 160 of 160 rows, gold fails on 1.")
    assert "train-7" in result.evidence
    splits = result_of("THREE_SPLITS", "splits")
    assert splits.status == Status.PASS
    assert splits.evidence.startswith("100 training rows, 20 for the run's evaluations, 40 held out: disjoint")
    shared = result_of("SHARED_SPLIT", "splits")
    assert shared.status == Status.FAIL and "3 share prompt and ground truth (again-train-0;" in shared.evidence


def test_players_that_reject_every_row_are_named(monkeypatch):
    told = "has no right answer to these rows: row train-0 has no column patch; add one"
    for check in ("gold", "turns", "stalling", "stuffing", "prompt"):
        result = result_of("UNKNOWN", check)
        assert result.status == Status.SKIP and told in result.evidence, check
    optimum = result_of("UNKNOWN", "local_optimum")
    assert (optimum.status, optimum.evidence) == (Status.SKIP, "the demonstrator rejects all of these rows")


def test_rows_without_time_for_gold_are_counted(monkeypatch):
    """A simulated clock advances by a second at each call: gold gets 16 rows, and then as many others as fit."""
    ticks = count()
    monkeypatch.setattr("mtrl.preflight.stage.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    result = result_of("FAMILY_OF_70", "gold", seconds=30.0)
    assert result.status == Status.PASS
    assert (
        result.evidence
        == "on 45 of 70 rows gold gets the full reward and scores 1 (25 episodes were left out for lack of time)"
    )
