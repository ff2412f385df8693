"""Tables of the checks and hints, which exist because asking would import torch, agree with the code."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mtrl.config.algorithm_schema import PUBLISHED_BOUNDS, AlgorithmConfig
from mtrl.config.keys import all_keys, find, settings


def test_the_names_written_down_are_those_of_the_registries():
    from mtrl.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, LOSSES, REDUCTIONS

    registries = {registry.key: registry for registry in (ESTIMATORS, LOSSES, REDUCTIONS, CORRECTIONS, KL_ESTIMATORS)}
    declared = {path: key for path, key in all_keys().items() if key.functions}
    assert registries.keys() == declared.keys()
    for path, key in declared.items():
        entries = {name: registries[path].find(name) for name in registries[path].names()}
        ours = {n: e for n, e in entries.items() if e.function.__module__.startswith("mtrl.")}  # tests register others
        assert sorted(key.functions) == sorted(ours)
        assert dict(key.aliases) == {name: entry.name for name, entry in ours.items() if name != entry.name}


def test_the_bounds_written_down_are_those_of_the_corrections():
    import torch

    from mtrl.algorithms.losses import TokenBatch
    from mtrl.algorithms.registry import find_correction

    assert {"none", *PUBLISHED_BOUNDS} == set(find("algorithm.off_policy_correction").functions)
    for name, (low, high) in PUBLISHED_BOUNDS.items():
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

    assert set(find("algorithm.passk.estimator").choices) == set(ADVANTAGES)
    assert set(find("algorithm.dppo.divergence").choices) == set(DIVERGENCES)


def test_the_readers_of_a_key_are_keys_and_words_that_exist():
    with_readers = [key for key in all_keys().values() if key.read_with]
    assert len(with_readers) > 15
    for key in with_readers:
        for chooser, words in key.read_with.items():
            known = all_keys()[chooser]
            assert set(words) <= {*known.choices, *known.functions} - known.aliases.keys(), key.path


def test_every_key_of_the_algorithm_declares_its_readers_or_is_always_read():
    from mtrl.command.hints import IDLE

    always = (
        *("advantage_method", "credit", "group_size", "norm_by_std", "loss_fn", "loss_reduction", "kl_loss_coef"),
        *("kl_reward_coef", "entropy_coef", "expert_balance_coef", "router_replay", "loss_anchor"),
        *("off_policy_correction", "drop_zero_advantage", "dynamic_sampling_rounds", "overlong_filtering", "extra"),
    )
    placed = {path for paths, *_ in IDLE for path in paths} | {k.path for k in all_keys().values() if k.read_with}
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
    return dict(find(path).read_with)


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
