"""Groups built from rewards, and their advantages. Not a test; the tests of this folder import it."""

from hypothesis import strategies as st

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.registry import ESTIMATORS
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig
from mtrl.types import FinishReason, Group, Trajectory, Turn

reward = st.integers(-40, 40).map(lambda n: n / 8)
"""Rewards on a grid, so that differences are either exactly 0 or far above rounding."""
trajectory = st.lists(reward, min_size=1, max_size=5)
group = st.lists(trajectory, min_size=1, max_size=7)
groups = st.lists(st.lists(trajectory, min_size=2, max_size=5), min_size=1, max_size=4)


METHODS = {entry.name: entry for entry in map(ESTIMATORS.find, ESTIMATORS.names()) if not entry.needs_critic}
"""Every registered estimator that works without a critic."""
PASS_AT_K = ("pkpo_sloo1", "pkpo_sloo", "top2")
"""The estimators of grpo_passk that take any rewards."""


def configurations():
    """Return every method with each supported credit, and each estimator of grpo_passk, as (label, config)."""
    for name, entry in METHODS.items():
        for credit in entry.credits or (None,):
            for estimator in PASS_AT_K if name == "grpo_passk" else (None,):
                passk = PassKConfig(k=2, estimator=estimator or "pkpo_sloo1")
                label = "-".join(filter(None, (name, credit, estimator)))
                yield label, AlgorithmConfig(advantage_method=name, credit=credit, passk=passk)


CONFIGURATIONS = dict(configurations())


def make_turn(reward, tokens=1, observation="", components=None):
    return Turn(
        observation_ids=[1],
        action_ids=[2] * tokens,
        action_logprobs=[-0.1] * tokens,
        version_spans=[(0, tokens)],
        finish=FinishReason.STOP,
        text="",
        message={},
        observation=[{"role": "user", "content": observation}],
        reward=reward,
        components=components or {},
    )


def make_group(rewards, tokens=None, observations=None, components=None):
    """A group of trajectories with these rewards per turn.

    Args:
        tokens: sampled tokens per turn, nested like the rewards; None: 1 each.
        observations: observation of each turn; None: observations that depend only on the number of the turn.
        components: components of the reward per turn; None: no components.
    """

    def turn(i, t, value):
        return make_turn(
            value,
            tokens[i][t] if tokens else 1,
            observations[i][t] if observations else f"turn {t}",
            components[i][t] if components else None,
        )

    trajectories = [
        Trajectory("task", "group", i, [turn(i, t, value) for t, value in enumerate(turns)])
        for i, turns in enumerate(rewards)
    ]
    return Group("group", {}, trajectories)


def advantages(rewards, method="grpo", tokens=None, **settings):
    """Return the advantages of one group, nested like its rewards."""
    config = AlgorithmConfig(advantage_method=method, **settings)
    return turn_advantages([make_group(rewards, tokens)], config)[0]


def batch_advantages(batch, config, tokens=None):
    """Return the advantages of several groups of rewards."""
    return turn_advantages([make_group(g, tokens[i] if tokens else None) for i, g in enumerate(batch)], config)


def flat(nested):
    """Return the numbers of a nested list, in order."""
    return [x for inner in nested for x in flat(inner)] if isinstance(nested, list) else [nested]


def shape(nested):
    """Return the lengths of a nested list."""
    return [shape(inner) for inner in nested] if isinstance(nested, list) else None
