"""Noise is no symptom: runs that learn get neither an alarm nor a warning at any step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import configured, learning, record, rows

from mtrl.diagnose.finding import Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import RULES
from mtrl.diagnose.walk import walk


def bad(findings):
    return [f"{f.rule}: {f.title}" for f in findings if f.severity != Severity.NOTE]


def reported_during_the_run(made, config):
    """Return the alarms and warnings that a watch would report, step by step."""
    growing, found = Record(config), []
    for row in made:
        growing.add(row)
        diagnosis = walk(growing)
        assert not diagnosis.broken
        found += [f"step {growing.step} {each}" for each in bad(diagnosis.findings)]
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.floats(0.1, 0.4),
    end=st.floats(0.9, 0.98),
    steps=st.integers(20, 120),
    speed=st.floats(3, 10),
)
def test_a_run_that_learns_is_healthy_at_the_end(seed, start, end, steps, speed):
    """A run that stays at 0.6 for 50 steps has stalled, and gets a warning."""
    run = record(seed, learning(start, end, steps, speed))
    diagnosis = walk(run)
    assert not diagnosis.broken
    assert bad(diagnosis.findings) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_learns_is_healthy_all_the_way(seed):
    config = configured(trainer__max_steps=80)
    assert reported_during_the_run(rows(seed, learning(0.2, 0.92, 80)), config) == []


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), level=st.floats(0.1, 0.9), steps=st.integers(1, 24))
def test_noise_around_a_level_is_no_symptom_yet(seed, level, steps):
    run = record(seed, np.full(steps, level), configured(trainer__max_steps=100))
    assert bad(walk(run).findings) == []


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(30, 100))
def test_a_solved_task_is_healthy_though_its_groups_agree(seed, steps):
    run = record(seed, np.full(steps, 0.97))
    assert bad(walk(run).findings) == []


def test_a_slow_start_is_a_note_at_most():
    """Half of the runs of `experiments/signal` are silent for 25 steps and learn afterwards."""
    run = record(3, np.full(30, 0.2), configured(trainer__max_steps=100))
    assert bad(walk(run).findings) == []


def test_an_empty_run_and_a_run_of_one_step_raise_nothing():
    for count in (0, 1, 2):
        run = Record(configured(), None, rows(0, learning(0.2, 0.9, 30))[: count + 1])
        diagnosis = walk(run)
        assert not diagnosis.broken and not bad(diagnosis.findings)
        assert len(diagnosis.checked) + len(diagnosis.early) == len(RULES)


def test_missing_metrics_raise_nothing():
    """Older runs lack most metrics."""
    keys = ("step", "rollout/reward/mean", "val/success/mean")
    old = [{key: row[key] for key in keys if key in row} for row in rows(0, learning(0.2, 0.9, 80))]
    diagnosis = walk(Record({}, None, old))
    assert not diagnosis.broken and bad(diagnosis.findings) == []


def test_a_policy_that_is_better_than_its_samples_is_solved():
    """Sampled at temperature 1 it succeeds in 85 %, greedy nearly always: a plateau there is no stall."""
    run = record(0, np.r_[learning(0.3, 0.86, 30), np.full(90, 0.86)], **{"val/success/mean": 0.99})
    assert not any(f.rule == "stall" for f in walk(run).findings)


def test_groups_that_agree_because_they_succeed_are_a_note():
    run = record(0, np.full(60, 0.82), **{"analysis/zero_adv_frac": 0.85})
    severities = [f.severity for f in walk(run).findings if f.rule == "equal_groups"]
    assert severities == [Severity.NOTE]
