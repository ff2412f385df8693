"""Credit by a critic: sources of a mixture and roles of self-play are whitened separately, by values of one critic."""

from dataclasses import replace
from statistics import fmean

import pytest
from critics import METHODS, config_of, critic_of, groups_of

from mtrl.config.schema import RewardConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.mixture import MixedComposer
from mtrl.trainer.update.critic import credit_by_critic
from mtrl.types import Group

COMPOSER = RewardComposer(RewardConfig())
MIXED = MixedComposer({name: RewardComposer(RewardConfig()) for name in "ab"})


@pytest.fixture
def groups(tiny_model):
    """Five groups of four trajectories, some with several samples, and one trajectory that is not trained."""
    made = [*groups_of(tiny_model.config.vocab_size, 5, split=True)]
    made[3].trajectories[1].trainable = False
    return made


def with_sources(groups):
    """The second and the fourth group have rewards a hundred times as large, and another source."""
    for place, group in enumerate(groups):
        name = "ab"[place % 2]
        group.row = {"id": f"{name}/{place}"}
        for turn in (turn for trajectory in group.trajectories for turn in trajectory.turns):
            turn.reward *= 100.0 if name == "b" else 1.0
    return [groups[0::2], groups[1::2]], MIXED


def with_roles(groups):
    """Every second trajectory is one of another role."""
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.role = "xo"[trajectory.index % 2]
    return [[group.by_role()[place] for group in groups] for place in range(2)], COMPOSER


def as_one_task(groups):
    return [
        Group(group.group_id, {"id": "t"}, [replace(trajectory, role=None) for trajectory in group.trajectories])
        for group in groups
    ]


def by_sample(credited):
    """Return advantages, old values and targets of each sample by its trajectory and its last turn."""
    rows = zip(credited.samples, credited.old_values, credited.targets, strict=True)
    return {
        (sample.group_id, sample.trajectory, max(sample.turns)): (sample.advantages, list(values), list(targets))
        for sample, values, targets in rows
    }


@METHODS
@pytest.mark.parametrize("divide", [with_sources, with_roles])
def test_a_batch_has_the_advantages_and_targets_that_it_has_alone(tiny_model, groups, method, divide):
    config = config_of(method)
    critic = critic_of(tiny_model, config, head=1)
    batches, composer = divide(groups)
    found = credit_by_critic(groups, config.algorithm, critic, composer)
    alone = [credit_by_critic(batch, config.algorithm, critic, COMPOSER) for batch in batches]
    one_task = credit_by_critic(as_one_task(groups), config.algorithm, critic, COMPOSER)
    assert by_sample(found) == by_sample(alone[0]) | by_sample(alone[1])
    assert [*by_sample(found)] == [*by_sample(one_task)], "the order is that of one task"
    assert [s.advantages for s in found.samples] != [s.advantages for s in one_task.samples]

    per_turn = {
        (trajectory.group_id, trajectory.index, turn): advantage
        for group, shown in zip(groups, found.advantages, strict=True)
        for trajectory, turns in zip(group.trajectories, shown, strict=True)
        for turn, advantage in enumerate(turns)
    }
    for key, (advantages, _, _) in by_sample(found).items():  # each sample is one turn
        assert fmean(a for a in advantages if a) == pytest.approx(per_turn[key])
