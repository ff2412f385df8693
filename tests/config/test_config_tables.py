"""Tables of the checks and hints, which exist because asking would import torch, agree with the code."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mtrl.command.hints import READERS
from mtrl.config.choices import ALIASES, BOUNDS, CHOICES, REGISTERED, WITH_TORCH
from mtrl.config.keys import all_keys, find, settings
from mtrl.config.schema import AlgorithmConfig


def test_the_names_written_down_are_those_of_the_registries():
    from mtrl.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, LOSSES, REDUCTIONS

    tensors = {registry.key: registry for registry in (LOSSES, CORRECTIONS, KL_ESTIMATORS)}
    assert tensors.keys() == WITH_TORCH.keys()
    registries = {**tensors, ESTIMATORS.key: ESTIMATORS, REDUCTIONS.key: REDUCTIONS}
    assert registries.keys() == REGISTERED.keys()
    for key, names in REGISTERED.items():
        found = [(name, registries[key].find(name).function.__module__) for name in registries[key].names()]
        ours = [name for name, module in found if module.startswith("mtrl.")]  # other tests register some of their own
        assert sorted(names) == ours
    for alias in set(LOSSES.names()) & ALIASES.keys():
        assert LOSSES.find(alias).name == ALIASES[alias]
    assert {name for name in LOSSES.names() if LOSSES.find(name).name != name} == ALIASES.keys()


def test_the_bounds_written_down_are_those_of_the_corrections():
    import torch

    from mtrl.algorithms.losses import TokenBatch
    from mtrl.algorithms.registry import find_correction

    assert {"none", *BOUNDS} == set(WITH_TORCH["algorithm.off_policy_correction"])
    for name, (low, high) in BOUNDS.items():
        ratios = [r for bound in (low, high) for r in (0.9999 * bound, 1.0001 * bound) if r]
        for ratio in ratios:  # one token, so that it is its trajectory
            difference = torch.tensor([math.log(ratio)], dtype=torch.float64)
            tokens = TokenBatch(difference, difference, difference)
            weight = find_correction(name)(difference, tokens, AlgorithmConfig()).item()
            passes = {"tis": ratio, "sequence_tis": ratio, "icepop": ratio}.get(name, 1.0)
            cut = {"tis": high, "sequence_tis": high}.get(name, 0.0)
            assert weight == pytest.approx(passes if low <= ratio <= high else cut), (name, ratio)


def test_the_words_of_passk_and_dppo_are_those_of_the_functions():
    from mtrl.algorithms.advantages.pass_at_k import ADVANTAGES
    from mtrl.algorithms.losses import DIVERGENCES

    assert set(CHOICES["algorithm.passk.estimator"]) == set(ADVANTAGES)
    assert set(CHOICES["algorithm.dppo.divergence"]) == set(DIVERGENCES)


def test_the_table_of_readers_names_keys_and_choices_that_exist():
    known = {**CHOICES, **REGISTERED}
    for paths, readers in READERS:
        assert all(path in all_keys() for path in paths)
        for chooser, choices in readers.items():
            assert set(choices) <= set(known[chooser]), chooser


def test_every_key_of_the_algorithm_is_in_the_tables_or_always_read():
    """Each new key must be in the table of its readers."""
    from mtrl.command.hints import IDLE

    always = (
        *("advantage_method", "credit", "group_size", "norm_by_std", "loss_fn", "loss_reduction", "kl_loss_coef"),
        *("kl_reward_coef", "entropy_coef", "loss_anchor", "off_policy_correction", "drop_zero_advantage"),
        *("dynamic_sampling_rounds", "overlong_filtering", "extra"),
    )
    placed = {path for table in (READERS, IDLE) for paths, *_ in table for path in paths}
    for path in settings():
        if path.startswith("algorithm."):
            parents = {path, path.rpartition(".")[0], ".".join(path.split(".")[:2])}
            assert parents & placed or path.removeprefix("algorithm.") in always, path


def test_the_defaults_of_the_critics_optimizer_are_its_own():
    assert find("algorithm.critic.optimizer.lr").default == AlgorithmConfig().critic.optimizer.lr
    assert find("algorithm.critic.optimizer.lr").default != find("trainer.optimizer.lr").default


OTHER_VALUES = {
    "algorithm.gamma": 0.5,
    "algorithm.turn_advantage_coef": 0.25,
    "algorithm.norm_by_std": False,
    "algorithm.gae_lambda": 0.5,
    "algorithm.whiten_advantages": False,
}
"""Two values of each key that estimators read."""


def step_of_groups():
    """Return two groups of four with one to three turns, rewards that do not cancel, and two repeated observations."""
    from mtrl.types import FinishReason, Group, Trajectory, Turn

    draw = np.random.default_rng(0)

    def turn(index):
        said = [{"role": "user", "content": f"page {index % 2}"}]
        reward = float(draw.normal())
        parts = {"environment": reward, "turn_penalty": float(draw.normal())}
        return Turn([1], [2] * int(draw.integers(1, 5)), [], [], FinishReason.STOP, "", {}, said, reward, parts)

    return [
        Group(str(g), {}, [Trajectory("t", str(g), i, [turn(n) for n in range(1 + (i + g) % 3)]) for i in range(4)])
        for g in range(2)
    ]


def readers_of(path: str) -> dict[str, tuple[str, ...]]:
    return {chooser: words for paths, table in READERS if path in paths for chooser, words in table.items()}


@pytest.mark.parametrize("path", OTHER_VALUES)
def test_the_table_of_readers_is_what_the_estimators_read(path):
    """For every method and credit, the key changes the advantages exactly if the table lists it as read."""
    from mtrl.algorithms.advantages import estimate
    from mtrl.algorithms.batch import CreditBatch
    from mtrl.algorithms.registry import ESTIMATORS

    batch = CreditBatch.of(step_of_groups(), {"environment": 1.0, "turn_penalty": 0.5})
    batch = replace(batch, values=np.where(batch.mask, 0.3, 0.0))
    # norm_by_std is not in the table, since false is harmless. The schema names its readers.
    readers = readers_of(path) or {"algorithm.advantage_method": ("grpo", "mt_grpo", "gigpo")}
    for name in ESTIMATORS.names():
        entry = ESTIMATORS.find(name)
        for credit in entry.credits or (None,):
            plain = AlgorithmConfig(advantage_method=name, credit=credit)
            changed = replace(plain, **{path.removeprefix("algorithm."): OTHER_VALUES[path]})
            is_read = not np.array_equal(estimate(batch, plain), estimate(batch, changed))
            chosen = {"algorithm.advantage_method": entry.name, "algorithm.credit": credit}
            assert is_read == any(chosen[chooser] in words for chooser, words in readers.items()), (name, credit)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("clip_low_threshold", 0.5),
        ("clip_high_threshold", 2.0),
        ("dual_clip", 1.5),
        ("is_cap", 1.1),
        ("sapo.tau_positive", 2.0),
        ("sapo.tau_negative", 2.0),
        ("dppo.divergence", "kl"),
        ("dppo.delta_low", 0.01),
        ("dppo.delta_high", 0.01),
    ],
)
def test_the_table_of_readers_is_what_the_losses_read(path, value):
    import torch
    from omegaconf import OmegaConf

    from mtrl.algorithms.losses import TokenBatch
    from mtrl.algorithms.registry import LOSSES

    generator = torch.Generator().manual_seed(0)
    logprobs, old, rollout, advantages = torch.randn(4, 200, generator=generator, dtype=torch.float64)
    tokens = TokenBatch(-abs(logprobs), -abs(old), advantages, -abs(rollout), torch.arange(200) // 4)
    plain, changed = (OmegaConf.structured(AlgorithmConfig) for _ in range(2))
    OmegaConf.update(changed, path, value)
    readers = readers_of(f"algorithm.{path}") or readers_of(f"algorithm.{path.partition('.')[0]}")
    for name in LOSSES.names():
        entry = LOSSES.find(name)
        is_read = not torch.equal(entry(tokens, plain)[0], entry(tokens, changed)[0])
        assert is_read == (entry.name in readers["algorithm.loss_fn"]), name


@pytest.mark.parametrize(("path", "value"), [("correction_low", 0.7), ("correction_high", 1.3)])
def test_the_table_of_readers_is_what_the_corrections_read(path, value):
    import torch

    from mtrl.algorithms.losses import TokenBatch
    from mtrl.algorithms.registry import CORRECTIONS

    difference = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    tokens = TokenBatch(difference, difference, difference, trajectory=torch.arange(31))
    for name in CORRECTIONS.names():
        weights = [
            CORRECTIONS.find(name)(difference, tokens, config)
            for config in (AlgorithmConfig(), AlgorithmConfig(**{path: value}))
        ]
        is_read = not torch.equal(*weights)
        assert is_read == (name in readers_of(f"algorithm.{path}")["algorithm.off_policy_correction"]), name
