"""Metrics of the episodes of a step."""

from mtrl.rollout.rollouts import RolloutReport
from mtrl.scoring.agreement import Thresholds
from mtrl.trainer.rollout_metrics import rollout_metrics, staleness_metrics
from mtrl.types import FinishReason
from tests.trainer.helpers import make_group


def test_components_are_summed_per_episode_and_metrics_are_means_of_the_turns_that_report_them():
    group = make_group(0, 50, size=2, turns=3)
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            turn.components = {"style": 0.25}
        trajectory.turns[-1].metrics = {"field_acc": 0.5 * (trajectory.index + 1)}
    metrics = rollout_metrics(RolloutReport([group]))
    turns = sum(len(trajectory.turns) for trajectory in group.trajectories)
    assert metrics["rollout/components/style"] == 0.25 * turns / 2
    assert metrics["rollout/metrics/field_acc"] == 0.75


def test_metrics_of_episodes_are_means_over_those_that_report_them_and_counts_over_all():
    group = make_group(0, 50, size=4)
    first, second, *_ = group.trajectories
    first.metrics |= {"tests": 3.0, "gateway/dropped": 2.0}
    second.metrics |= {"tests": 4.0}
    first.turns[0].metrics = {"tests": 100.0}
    metrics = rollout_metrics(RolloutReport([group]))
    assert metrics["rollout/episode/tests"] == 3.5 and metrics["rollout/gateway/dropped"] == 0.5
    assert metrics["rollout/metrics/tests"] == 100.0
    assert {key for key in metrics if "tests" in key or "dropped" in key} == {
        "rollout/episode/tests",
        "rollout/gateway/dropped",
        "rollout/metrics/tests",
    }


def test_verdicts_caps_and_context_by_worked_numbers():
    group = make_group(0, 50, size=4, turns=2)
    for trajectory, (reward, score) in zip(group.trajectories, [(1, 1), (1, 0), (0, 1), (0, 0)], strict=True):
        for turn in trajectory.turns:
            turn.reward = 0.0
        trajectory.turns[-1].reward, trajectory.score = float(reward), float(score)
    group.trajectories[2].turns[0].finish = FinishReason.LENGTH
    metrics = rollout_metrics(RolloutReport([group]))
    assert metrics["rollout/success/mean"] == metrics["rollout/claims/mean"] == 0.5
    assert metrics["rollout/lenient_frac"] == metrics["rollout/strict_frac"] == 0.25
    assert metrics["rollout/tokens/at_cap_frac"] == 0.25
    assert metrics["rollout/reward/std"] == metrics["analysis/group_reward_std"] == 0.5
    context = [sum(len(turn.observation_ids + turn.action_ids) for turn in t.turns) for t in group.trajectories]
    assert metrics["rollout/context/max"] == max(context)
    assert metrics["rollout/context/mean"] == sum(context) / 4
    group.trajectories[0].turns[-1].break_reason = "template"  # its observation is then the whole context
    last = group.trajectories[0].turns[-1]
    assert group.trajectories[0].context_tokens == len(last.observation_ids + last.action_ids)
    metrics = rollout_metrics(RolloutReport([group]))
    assert metrics["rollout/breaks"] == metrics["rollout/breaks/template"] == 1.0
    assert metrics["rollout/breaks/branch"] == 0.0


def test_a_reward_of_another_scale_needs_another_threshold():
    group = make_group(0, 50, size=1, turns=1)
    group.trajectories[0].turns[0].reward, group.trajectories[0].score = 1.4, 0.0
    assert rollout_metrics(RolloutReport([group]))["rollout/lenient_frac"] == 1.0
    assert rollout_metrics(RolloutReport([group]), Thresholds(1.0, 2.0))["rollout/lenient_frac"] == 0.0


def test_staleness_counts_tokens_by_the_weights_that_sampled_them():
    group = make_group(0, 50, size=1, turns=1)
    turn = group.trajectories[0].turns[0]
    turn.version_spans = [(1, 90), (3, 10)]
    metrics = staleness_metrics([group], 3)
    assert metrics == {
        "analysis/staleness/mean": 1.8,
        "analysis/staleness/p95": 2.0,
        "analysis/staleness/max": 2.0,
    }
    assert staleness_metrics([], 3) == {}


def test_a_step_without_turns_has_no_metrics_of_turns():
    """Such as a step of self-play in which the frozen role ended every episode by its first move."""
    group = make_group(0, 50, size=2)
    for trajectory in group.trajectories:
        trajectory.turns.clear()
    metrics = rollout_metrics(RolloutReport([group]))
    assert metrics["rollout/turns/mean"] == metrics["rollout/context/max"] == 0.0
    assert not {key for key in metrics if "response" in key or "cut_frac" in key}
