"""Sound tasks of a user's own that differ from the shipped ones: the checklist finds nothing wrong with them."""

from dataclasses import replace

from omegaconf import OmegaConf

from mtrl.config.compose import compose
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.factory import load_task
from mtrl.environments.family import Family, Splits
from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.context import Context
from mtrl.preflight.result import Status
from tests.preflight.broken import sound

SUBMIT = "<submit>done</submit>"


class Raising(sound.Lookup):
    """Raises for one response, which no model says."""

    def step(self, response, ground_truth):
        if response == "unreadable patch":
            raise RuntimeError("the patch does not apply")
        return super().step(response, ground_truth)


class Submitting(BaseEnvironment):
    """The work is done in one turn and handed in by the next, which says the same on all rows."""

    def reset(self, row):
        self.word = None

    def step(self, response, ground_truth):
        self.current_turn += 1
        if response.startswith("<do>"):
            self.word = response.removeprefix("<do>").removesuffix("</do>")
        done = SUBMIT in response
        return StepResult(float(done and self.word == ground_truth["word"]), "done", done or self.current_turn >= 5)


class Seeded(BaseEnvironment):
    """A number that follows from the seed is asked for."""

    def reset(self, row):
        return [{"role": "user", "content": f"say {row['seed']}"}]

    def step(self, response, ground_truth):
        return StepResult(1.0, None, done=True)


def broken_rows(row):
    wrong = {"train-0": ["unreadable patch"], "train-101": ["<final_output>1</final_output>"]}
    return wrong.get(row["id"]) or sound.gold(row)


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
SEEDED = Family("seeded", Seeded, _seeded, lambda trajectory, row: trajectory.reward)
SAME_SEEDS = replace(SEEDED, load=_same_seeds)


def result_of(family, check):
    """One line of the checklist, without fresh processes."""
    choice = [
        "experiment=null",
        "environment.name=x",
        f"environment.target={__name__}.{family}",
        "generator.max_turns=5",
    ]
    config = OmegaConf.to_object(compose(choice))
    task = load_task(config)
    context = Context(config, task.family, task.splits, task.make_environment, 16, 30.0)
    (result,) = run(context, [(check, CHECKS[check])])
    return result


def test_a_last_reply_that_only_hands_in_is_no_answer_to_be_stuffed():
    result = result_of("SUBMITTED", "stuffing")
    assert result.status == Status.SKIP and "the same on all rows" in result.evidence


def test_rows_that_differ_by_their_seed_are_different_problems():
    assert result_of("SEEDED", "splits").status == Status.PASS


def test_seeds_that_are_in_both_splits_are_found():
    result = result_of("SAME_SEEDS", "splits")
    assert result.status == Status.FAIL and "10 share prompt" in result.evidence


def test_gold_is_tried_on_every_row():
    """Rows 0 and 101 of 120 are broken, and 16 rows are played for the other checks."""
    result = result_of("BROKEN_ROWS", "gold")
    assert result.status == Status.FAIL and result.evidence.startswith("on 200 of 200 rows, gold fails on 2.")
    assert "the patch does not apply" in result.evidence and "train-101" in result.evidence


def test_a_broken_gold_row_is_no_matter_of_the_environments_robustness():
    assert result_of("BROKEN_ROWS", "robust").status == Status.PASS
