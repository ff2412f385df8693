"""What the episodes of a step looked like, in numbers."""

from mtrl.generator.rollouts import RolloutReport
from mtrl.trainer.loop import rollout_metrics
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
