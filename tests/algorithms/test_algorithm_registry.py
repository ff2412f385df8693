"""Registries: names, aliases, dotted paths, errors for unknown names, and the truth of the traits."""

import subprocess
import sys

import numpy as np
import pytest

from mtrl.algorithms.advantages import estimate
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.registry import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    LOSSES,
    REDUCTIONS,
    RegisteredFunction,
    Registry,
    find_correction,
    find_estimator,
    find_kl,
    find_loss,
    find_reduction,
)
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.errors import UserError
from mtrl.types import FinishReason, Group, Trajectory, Turn


def a_loss(tokens, config):
    return -tokens.advantages * tokens.logprobs, {}


def test_the_default_configuration_can_be_found():
    config = AlgorithmConfig()
    assert find_estimator(config.advantage_method).needs_group
    assert find_loss(config.loss_fn).name == "ppo"
    assert find_reduction(config.loss_reduction).name == "token_mean"
    assert find_correction(config.off_policy_correction).name == "none"
    assert find_kl(config.kl_estimator).name == "k3"


def test_the_registries_are_those_of_keys_that_exist():
    from mtrl.config.keys import find

    for registry in (ESTIMATORS, LOSSES, REDUCTIONS, CORRECTIONS, KL_ESTIMATORS):
        key = find(registry.key)
        assert key is not None and key.default in registry


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("group_based", "grpo"),
        ("reinforce_plus_plus", "reinforce_pp"),
        ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
    ],
)
def test_an_alias_is_the_same_entry(alias, name):
    assert find_estimator(alias) is find_estimator(name)


def test_an_unknown_name_is_an_error_with_the_nearest_and_all_names():
    with pytest.raises(UserError, match=r"algorithm\.loss_fn=cisspo .*did you mean cispo.*importance_sampling, ppo"):
        find_loss("cisspo")


def test_a_dotted_path_finds_a_users_function():
    assert find_loss(f"{__name__}.a_loss").function is a_loss


@pytest.mark.parametrize("path", ["no.such.module", f"{__name__}.missing", f"{__name__}.pytest", ".x"])
def test_an_invalid_dotted_path_is_an_error(path):
    with pytest.raises(UserError, match="algorithm.advantage_method="):
        find_estimator(path)


def test_a_registered_user_function_keeps_its_traits_when_found_by_path():
    registry = Registry("key", __name__)
    registry.register("mine", needs_group=True, credits=("turn",))(a_loss)
    assert registry.find(f"{__name__}.a_loss") is registry.find("mine")
    assert registry.find("mine") == RegisteredFunction("mine", a_loss, needs_group=True, credits=("turn",))


def test_a_name_can_be_registered_once():
    find_estimator("grpo")  # the first lookup registers the built-in estimators
    for taken in ("grpo", "group_based"):
        with pytest.raises(ValueError, match="already registered"):
            ESTIMATORS.register(taken)(lambda batch, config: batch.rewards)


def test_an_unknown_trait_is_an_error():
    with pytest.raises(TypeError, match="need_group"):
        Registry("key", __name__).register("mine", need_group=True)(a_loss)


def test_estimators_and_rewards_do_not_import_torch():
    code = (
        "import sys, mtrl.algorithms.signal, mtrl.algorithms.reductions, mtrl.rewards.compose\n"
        "from mtrl.algorithms.registry import find_estimator; find_estimator('grpo')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The checks of a configuration and the trainer rely on the traits, so each trait is tested.

NAMES = [name for name in ESTIMATORS.names() if ESTIMATORS.find(name).name == name]
NO_CRITIC = [name for name in NAMES if not ESTIMATORS.find(name).needs_critic]


def groups_of(*rewards: list[list[float]]) -> CreditBatch:
    """Return a batch of groups of trajectories of turn rewards. Every turn of a trajectory has a different observation,
    and a second component gives every other reward."""

    def turn(place, reward):
        observation = [{"role": "user", "content": f"page {place}"}]
        parts = {"environment": reward, "bonus": reward * (place % 2)}
        return Turn([1], [2] * (place + 1), [0.0], [(0, 1)], FinishReason.STOP, "", {}, observation, reward, parts)

    groups = [
        Group(
            str(g),
            {},
            [Trajectory("t", str(g), i, [turn(n, r) for n, r in enumerate(row)]) for i, row in enumerate(rows)],
        )
        for g, rows in enumerate(rewards)
    ]
    return CreditBatch.of(groups, {"environment": 1.0, "bonus": 1.0})


MIXED = groups_of([[0.2, 1.0], [0.0], [0.2, 0.0], [0.1, 1.0]], [[0.5], [0.0, 0.25, 1.0], [0.0], [0.75, 0.0]])


@pytest.mark.parametrize("name", NO_CRITIC)
def test_null_credit_is_the_first_supported_credit(name):
    credits = ESTIMATORS.find(name).credits
    published = estimate(MIXED, AlgorithmConfig(advantage_method=name, credit=None))
    by_credit = [estimate(MIXED, AlgorithmConfig(advantage_method=name, credit=credit)) for credit in credits]
    if credits:
        np.testing.assert_array_equal(by_credit[0], published)
    for n, one in enumerate(by_credit):  # no two credits give the same advantages
        assert not any(np.allclose(one, other) for other in by_credit[:n])


@pytest.mark.parametrize("name", NO_CRITIC)
def test_needs_group_means_that_a_group_of_one_has_no_advantage(name):
    """Each prompt has one trajectory, with different rewards, so methods that only compare within a group give no
    advantage."""
    alone = groups_of([[0.5, 1.0]], [[0.0]], [[0.25, 0.0, 2.0]])
    config = AlgorithmConfig(advantage_method=name)
    config.passk.k = 1
    assert estimate(alone, config).any() != ESTIMATORS.find(name).needs_group


@pytest.mark.parametrize("name", NAMES)
def test_needs_critic_means_that_values_are_read(name):
    entry, config = ESTIMATORS.find(name), AlgorithmConfig(advantage_method=name)
    batch, values = MIXED, np.where(MIXED.mask, 0.5, 0.0)
    with_values = CreditBatch(
        batch.rewards, batch.mask, batch.tokens, batch.group, batch.trajectories, batch.component_weights, values
    )
    if entry.needs_critic:
        with pytest.raises(ValueError, match="values"):
            entry(batch, config)
        assert estimate(with_values, config).any()
    else:
        np.testing.assert_array_equal(estimate(with_values, config), estimate(batch, config))


def test_only_gae_works_per_token():
    assert [name for name in NAMES if ESTIMATORS.find(name).per_token] == ["gae"]


@pytest.mark.parametrize("registry", [LOSSES, CORRECTIONS], ids=lambda registry: registry.key)
def test_per_trajectory_means_that_a_token_depends_on_the_others_of_its_trajectory(registry):
    import torch

    from mtrl.algorithms.losses import TokenBatch

    old = torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64)
    advantages, trajectory = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([0, 0, 1])
    config = AlgorithmConfig()

    def of_the_first(moved: float):
        """Return the loss, or the weight, of the first token after the second has moved."""
        logprobs = old + torch.tensor([0.0, moved, 0.0], dtype=torch.float64)
        tokens = TokenBatch(logprobs, old, advantages, old, trajectory)
        if registry is LOSSES:
            return entry(tokens, config)[0][0].item()
        return entry(logprobs - old, tokens, config)[0].item()

    for name in registry.names():
        entry = registry.find(name)
        assert (of_the_first(0.0) != of_the_first(-1.0)) == entry.per_trajectory, name
