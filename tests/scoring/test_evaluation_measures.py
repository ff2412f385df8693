"""The figures of a run's evaluations, compared with numbers worked by hand and with those of an earlier version."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.schema import EvaluationConfig
from mtrl.errors import RunEndedError, UserError
from mtrl.scoring.agreement import EPSILON, Thresholds, TrajectoryAgreement
from mtrl.scoring.heldout import score_groups
from mtrl.scoring.measures import (
    Spread,
    episodes_of,
    field_accuracies,
    is_completed,
    is_out_of_turns,
    measured,
    nearest_rank,
    val_metrics,
)
from mtrl.scoring.pass_at_k import pass_at_k_by_prompt
from mtrl.scoring.statistics import success_rate
from mtrl.types import FinishReason, StopReason
from mtrl.utils.process import usable_cores
from tests.evaluation.made import family_of, groups_of, made_episode, scored

EPISODES = [
    made_episode("#### 5", score=1.0, reward=1.2),
    made_episode("hm", score=0.0, reward=1.0, turns=2, cut=True, stop=StopReason.TURN_TOKEN_LIMIT),
    made_episode("#### x", score=1.0, reward=0.5, turns=3, stop=StopReason.MAX_TURNS),
    made_episode("7", score=0.0, reward=-0.1),
]


def test_by_hand():
    for turn in EPISODES[0].turns:
        turn.components = {"correct": 1.0, "format": 0.2}
    metrics = val_metrics({"greedy": groups_of(EPISODES)}, EvaluationConfig(), family_of())
    assert metrics == pytest.approx(
        {
            "val/success/mean": 0.5,
            "val/success/ci_low": success_rate([[1], [0], [1], [0]]).low,
            "val/success/ci_high": success_rate([[1], [0], [1], [0]]).high,
            "val/reward/mean": 2.6 / 4,
            "val/success/pass_k_1": 0.5,
            "val/reward/pass_k_1": 0.5,
            "val/claims/mean": 0.5,
            "val/lenient_frac": 0.25,
            "val/strict_frac": 0.25,
            "val/episodes": 4.0,
            "val/turns/mean": 7 / 4,
            "val/turns/cut_frac": 2 / 7,
            "val/tokens/at_cap_frac": 0.25,
            "val/completion/mean": 0.5,
            **{f"val/stop/{reason}": 0.0 for reason in StopReason},
            "val/stop/done": 0.5,
            "val/stop/max_turns": 0.25,
            "val/stop/turn_token_limit": 0.25,
            "val/components/correct": 0.25,
            "val/components/format": 0.05,
            "val/format": 0.5,
            "val/fields/number": 0.5,
            "val/field_accuracy": 0.5,
        }
    )


samples = st.lists(st.tuples(st.sampled_from([0.0, 0.4, 1.0]), st.floats(-1, 2)), min_size=2, max_size=4)


@given(rows=st.lists(samples, min_size=1, max_size=5), threshold=st.sampled_from([0.4, 1.0]))
def test_sampled_numbers_are_those_of_the_sampled_episodes(rows, threshold):
    config = EvaluationConfig(pass_k_values=[1, 2], success_threshold=threshold)
    greedy = groups_of([made_episode(score=1.0)])
    sampled = groups_of([[made_episode(score=s, reward=r) for s, r in row] for row in rows], "sampled")
    metrics = val_metrics({"greedy": greedy, "sampled": sampled}, config, family_of(None))
    solved = [[float(s >= threshold) for s, _ in row] for row in rows]
    claimed = [[float(r >= threshold - EPSILON) for _, r in row] for row in rows]
    assert metrics["val/success/mean"] == 1.0
    assert metrics["val/success/sampled"] == success_rate(solved).value
    assert metrics["val/reward/sampled"] == pytest.approx(fmean(r for row in rows for _, r in row))
    for k in (1, 2):
        assert metrics[f"val/success/pass_k_{k}"] == pytest.approx(fmean(pass_at_k_by_prompt(solved, k)))
        assert metrics[f"val/reward/pass_k_{k}"] == pytest.approx(fmean(pass_at_k_by_prompt(claimed, k)))
    assert "val/format" not in metrics


def test_the_claim_has_a_threshold_of_its_own():
    groups = {"greedy": groups_of([made_episode(score=1.0, reward=0.6), made_episode(score=0.0, reward=0.6)])}
    high = val_metrics(groups, EvaluationConfig(), family_of())
    low = val_metrics(groups, EvaluationConfig(claim_threshold=0.5), family_of())
    assert (high["val/claims/mean"], high["val/lenient_frac"], high["val/strict_frac"]) == (0.0, 0.0, 0.5)
    assert (low["val/claims/mean"], low["val/lenient_frac"], low["val/strict_frac"]) == (1.0, 0.5, 0.0)
    assert Thresholds.of(EvaluationConfig()).verdict(groups["greedy"][0].trajectories[0]) == TrajectoryAgreement.STRICT


def test_pass_at_k_of_the_reward_is_that_of_the_reward():
    """R111: with a mean reward of 1 and a score of 0, pass@1 is 1 by the reward and 0 by the scorer."""
    groups = {"greedy": groups_of([made_episode(score=0.0, reward=1.0)] * 3)}
    metrics = val_metrics(groups, EvaluationConfig(), family_of())
    assert (metrics["val/reward/mean"], metrics["val/reward/pass_k_1"], metrics["val/success/pass_k_1"]) == (1, 1, 0)
    strict = val_metrics(groups, EvaluationConfig(claim_threshold=1.5), family_of())
    assert (strict["val/reward/pass_k_1"], strict["val/success/pass_k_1"]) == (0, 0)


def test_completion_is_an_answer_that_the_task_can_read():
    """R106, R128: the environment ends each of these episodes but the third; the second holds no answer."""
    episodes = [made_episode("#### 5"), made_episode("hm"), made_episode("#### 6", stop=StopReason.MAX_TURNS)]
    family = replace(family_of(), answered=lambda trajectory, row: "####" in trajectory.turns[-1].text)
    groups = groups_of([*episodes, made_episode("hm", stop=StopReason.MAX_TURNS)])
    for group in groups:
        asyncio.run(score_groups(family, [group], 60.0))
    found = [t for group in groups for t in group.trajectories]
    assert [is_completed(t) for t in found] == [True, False, True, False]
    assert [is_out_of_turns(t) for t in found] == [False, False, False, True]
    assert val_metrics({"greedy": groups}, EvaluationConfig(), family)["val/completion/mean"] == 0.5


def test_completion_of_a_task_without_an_answer_check_is_an_end_without_a_cut():
    """An episode that ends in a turn which the token limit cut is not completed; an earlier cut changes nothing."""
    cut_last, cut_first = made_episode(turns=2), made_episode(turns=2)
    cut_last.turns[-1].finish = cut_first.turns[0].finish = FinishReason.LENGTH
    out_of_turns = made_episode(stop=StopReason.MAX_TURNS)
    assert [is_completed(t) for t in (made_episode(), cut_last, cut_first, out_of_turns)] == [True, False, True, False]


def test_too_few_samples_for_a_k_are_reported():
    groups = {"greedy": groups_of(scored([1])), "sampled": groups_of(scored([[1, 0]]), "sampled")}
    with pytest.raises(UserError, match="pass@4 needs"):
        val_metrics(groups, EvaluationConfig(pass_k_values=[4]), family_of())


def test_a_failed_episode_without_a_turn_counts_and_is_not_measured():
    failure = made_episode(score=0.0, stop=StopReason.ENV_ERROR)
    failure.turns = []
    metrics = val_metrics({"greedy": groups_of([failure, made_episode(score=1.0)])}, EvaluationConfig(), family_of())
    assert (metrics["val/success/mean"], metrics["val/format"], metrics["val/episodes"]) == (0.5, 1.0, 2.0)


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), 10**400, "1"])
def test_measures_outside_of_zero_and_one_are_refused(value):
    family = family_of(lambda trajectory, row: {"length": value})
    with pytest.raises(UserError, match="measure length of environment.name=made"):
        val_metrics({"greedy": groups_of([made_episode()])}, EvaluationConfig(), family)


def test_other_measures_have_keys_of_their_own():
    family = family_of(lambda trajectory, row: {"executes": 1.0})
    metrics = val_metrics({"greedy": groups_of([made_episode()])}, EvaluationConfig(), family)
    assert metrics["val/measures/executes"] == 1.0 and "val/field_accuracy" not in metrics
    assert measured([], family_of(None)) == []


def test_field_accuracy_is_of_the_episodes_with_fields():
    values = [{"field/a": 1.0, "field/b": 0.0, "format": 1.0}, {"format": 0.0}, {"field/c": 1.0}]
    assert field_accuracies(values) == [0.5, 1.0]


@given(values=st.lists(st.integers(0, 9), min_size=1, max_size=30), share=st.floats(0.01, 1))
def test_nearest_rank_is_the_smallest_value_that_covers_the_share(values, share):
    ordered = sorted(values)
    covers = [v for v in ordered if sum(w <= v for w in ordered) >= share * len(ordered) - 1e-9]
    assert nearest_rank(ordered, share) == min(covers)


def test_spread():
    assert Spread.of([]) is None
    assert Spread.of(range(1, 101)) == Spread(50.5, 50.0, 95.0, 100.0)


def test_concurrent_scoring_gives_the_same_scores():
    """A scorer that waits for processes is called on several threads; another one on one, one call at a time."""
    threads = []

    def score(trajectory, row):
        threads.append(threading.current_thread())
        time.sleep(0.02)
        return trajectory.reward

    for waits in (False, True):
        groups = groups_of([made_episode(score=None, reward=float(number)) for number in range(8)])
        family = replace(family_of(), score=score, waits_for_processes=waits)
        threads.clear()
        asyncio.run(score_groups(family, groups, 60.0))
        assert [t.score for group in groups for t in group.trajectories] == [float(number) for number in range(8)]
        assert len(threads) == 8 and len(set(threads)) == (min(8, usable_cores()) if waits else 1)


def test_a_scorer_that_changes_its_row_changes_no_later_episode():
    """One that normalised the ground truth in place changed what later episodes of the row observed."""

    def pops(trajectory, row):
        return float(row["ground_truth"].pop("answer"))

    family = replace(family_of(), score=pops, answered=pops, measure=lambda *of: {"x": pops(*of)})
    groups = groups_of([made_episode(score=None)])
    groups[0].row["ground_truth"]["answer"] = "1"
    asyncio.run(score_groups(family, groups, 60.0))
    assert measured(episodes_of(groups), family) == [{"x": 1.0}]
    assert groups[0].row["ground_truth"] == {"answer": "1"}


def returns(value):
    return lambda trajectory, row: value


def exits(trajectory, row):
    os._exit(0)


def hangs(trajectory, row):
    threading.Event().wait(60)


class Numberless:
    def __bool__(self):
        raise ValueError("neither")


SCORER = "the scorer of made, on row row, "
FINITE = "it must be a finite number below 1e[+]12; fix `score`"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"score": returns(float("nan"))}, f"failed: TypeError: it returned nan; {FINITE}"),
        ({"score": returns(1e308)}, f"failed: TypeError: it returned 1e[+]308; {FINITE}"),
        ({"score": returns(None)}, f"failed: TypeError: it returned None; {FINITE}"),
        ({"score": exits}, r"failed: RuntimeError: SystemExit\('os._exit\(0\) in an environment'\); fix `score`"),
        ({"score": hangs}, "took longer than environment.episode_timeout=0.2 s; fix `score`, or raise it"),
        ({"answered": exits}, r"failed: .*os._exit\(0\) in an environment.*; fix `score` or `answered`"),
        ({"answered": hangs}, "took longer than environment.episode_timeout=0.2 s"),
        ({"answered": returns(Numberless())}, "failed: ValueError in .*: neither; fix `score` or `answered`"),
        ({"score": lambda trajectory, row: row["none"]}, "failed: KeyError in test_.*, line .*: 'none'; fix `score`"),
    ],
    ids=range(9),
)
def test_an_invalid_scorer_ends_the_run_in_one_sentence(hooks, message, waits):
    family = replace(family_of(), waits_for_processes=waits, **hooks)
    with pytest.raises(RunEndedError, match=SCORER + message):
        asyncio.run(
            score_groups(family, groups_of([made_episode(score=None)]), 0.2 if hangs in hooks.values() else 60.0)
        )


def test_a_score_is_a_plain_float_whatever_the_scorer_returns():
    groups = groups_of([made_episode(score=None)])
    for value in (True, np.float32(1), torch.tensor(1.0), 1):
        asyncio.run(score_groups(replace(family_of(), score=returns(value)), groups, 60.0))
        (trajectory,) = groups[0].trajectories
        assert trajectory.score == 1.0 and type(trajectory.score) is float


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (exits, "failed: SystemExit in .*: os._exit.0. in an environment; fix it"),
        (hangs, "took longer than 0.2 s; fix it"),
        (returns({3: 1.0}), "failed: TypeError: it returned measures with the name 3; it must be text"),
        (returns(None), "failed: TypeError"),
    ],
)
def test_an_invalid_measure_is_reported_in_one_sentence(measure, message, monkeypatch):
    if measure is hangs:
        monkeypatch.setattr("mtrl.scoring.measures.MEASURE_SECONDS", 0.2)
    with pytest.raises(UserError, match=f"`measure` of made, on row row0, {message}"):
        measured(episodes_of(groups_of([made_episode()])), family_of(measure))
