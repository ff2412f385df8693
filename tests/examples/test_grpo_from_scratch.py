"""The GRPO example learns its game, and its numbers equal those of the trainer on the same trajectories."""

import ast
import copy
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from examples import grpo_from_scratch as example
from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests.trainer.alone import updater_of

pytestmark = pytest.mark.xdist_group("grpo_from_scratch")  # one worker trains the model
METHODS = {"trajectory": "grpo", "turn": "group_based_per_turn"}
"""Value of `--credit` -> advantage method of mtrl."""
GROUP_SIZE = 8


def options(**changes):
    return Namespace(**{"steps": 3, "prompts": 7, "group_size": GROUP_SIZE, "credit": "turn", "lr": 1e-3} | changes)


class ExactNorm(Qwen3RMSNorm):
    """Qwen3 norm in the dtype of the model; Qwen3 itself normalises in float32.

    Adam turns a gradient near 0 into a whole step of either sign, so rounding must be far below all gradients.
    """

    def forward(self, hidden):
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.fixture(scope="module")
def model():
    """The policy of the example, partly trained so that turns and episodes have many lengths, in float64."""
    torch.set_num_threads(1)
    model = example.make_model(seed=0)
    example.train(model, options(steps=25))
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.__class__ = ExactNorm
    return model.double()


@pytest.fixture(scope="module")
def groups(model):
    """Groups of the rollout of the example; the last group has rewards of 0 and no advantages."""
    torch.manual_seed(1)
    secrets = [2, 5, 7, 4]
    groups = [example.rollout(model, [secret] * GROUP_SIZE) for secret in secrets]
    for turn in chain(*groups[-1]):
        turn.reward = 0.0
    assert len({len(trajectory) for group in groups for trajectory in group}) > 1
    return groups


def to_mtrl(groups):
    def turn(source):
        return Turn(
            observation_ids=source.observation_ids,
            action_ids=source.action_ids,
            action_logprobs=source.logprobs,
            version_spans=[(0, len(source.action_ids))],
            finish=FinishReason.STOP if source.action_ids[-1:] == [example.END] else FinishReason.LENGTH,
            text=example.decode(source.action_ids),
            message={"role": "assistant", "content": example.decode(source.action_ids)},
            reward=source.reward,
        )

    def trajectory(name, index, turns):
        return Trajectory("task", name, index, [turn(each) for each in turns], StopReason.DONE)

    return [
        Group(f"g{number}", {"id": "task"}, [trajectory(f"g{number}", i, turns) for i, turns in enumerate(group)])
        for number, group in enumerate(groups)
    ]


def config(credit, lr=1e-3):
    cfg = Config(run_dir="unused")
    cfg.algorithm = replace(
        cfg.algorithm,
        advantage_method=METHODS[credit],
        group_size=GROUP_SIZE,
        loss_fn="ppo",
        clip_low_threshold=0.8,
        clip_high_threshold=1.2,
        loss_reduction="token_mean",
        loss_anchor="rollout",
    )
    cfg.trainer.optimizer = OptimizerConfig(lr=lr, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    cfg.trainer.max_tokens_per_microbatch = 150  # several micro-batches, where the example has one batch
    return cfg


def batch_of(groups, credit):
    advantages = [example.CREDIT[credit](group) for group in groups]
    return example.collate(list(chain(*groups)), list(chain(*advantages)))


# The same numbers as mtrl


REWARDS = st.lists(st.integers(-20, 20).map(lambda tenths: tenths / 10), min_size=1, max_size=4)


@pytest.mark.parametrize("credit", METHODS)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=6))
def test_advantages_are_those_of_mtrl(credit, rewards):
    group = [[example.Turn([1], [0], [0.0], reward) for reward in row] for row in rewards]
    (expected,) = turn_advantages(to_mtrl([group]), config(credit).algorithm)
    found = example.CREDIT[credit](group)
    assert [len(row) for row in found] == [len(row) for row in rewards]
    np.testing.assert_allclose(list(chain(*found)), list(chain(*expected)), atol=1e-6, rtol=0)


def test_advantages_of_a_group_by_hand():
    """The example of 4.4 in the algorithms reference; trajectory: z-scores of 1.2, 0, 0.2 and 1.1, std 0.613052."""
    rows = [[0.2, 1.0], [0.0], [0.2, 0.0], [0.1, 1.0]]
    group = [[example.Turn([1], [0], [0.0], reward) for reward in row] for row in rows]
    turn = [[0.766667, 0.5], [-0.833333], [-0.566667, -1.0], [0.633333, 0.5]]
    for found, expected in zip(example.turn_advantages(group), turn, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    outcome = [0.937931, -1.019490, -0.693253, 0.774812]
    for found, expected, row in zip(example.trajectory_advantages(group), outcome, rows, strict=True):
        assert found == pytest.approx([expected] * len(row), abs=1e-5)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("credit", METHODS)
def test_loss_gradient_norm_and_weights_are_those_of_mtrl(credit, scale, model, groups, tmp_path):
    """With `scale` 100 the gradients of per-turn credit are clipped; the last of three updates clips ratios."""
    groups = copy.deepcopy(groups)
    for turn in chain(*chain(*groups)):
        turn.reward *= scale
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    cfg = config(credit, lr=3e-3)

    converted = to_mtrl(groups)
    advantages = turn_advantages(converted, cfg.algorithm)
    samples = [s for group, a in zip(converted, advantages, strict=True) for s in group_samples(group, a)]
    assert not all(
        any(sample.advantages) for sample in samples
    )  # mtrl drops samples without advantages, but counts their tokens
    updater = updater_of(
        cfg, Policy(theirs, None), None, Optimizer(theirs, cfg.trainer.optimizer, 9), tmp_path / "dump"
    )
    optimizer, batch = example.make_optimizer(mine, lr=3e-3), batch_of(groups, credit)
    for step in range(3):
        loss, norm = example.update(mine, optimizer, batch)
        metrics = updater.run(samples, step).report.metrics()
        assert loss == pytest.approx(metrics["train/loss"], abs=1e-6 * scale)
        assert norm == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
        assert metrics["train/clip_frac"] == 0 or step > 0

    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=0, msg=name)
    moved = max((a - b).abs().max() for a, b in zip(mine.parameters(), model.parameters(), strict=True))
    assert moved > 1e-3
    assert metrics["train/clip_frac"] > 0
    assert norm > 1 or (credit, scale) != ("turn", 100.0)


@pytest.mark.parametrize("credit", METHODS)
def test_without_advantages_no_weight_changes(credit, model, groups, tmp_path):
    """Adam has momentum from an earlier step, which must not move the weights."""
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    cfg = config(credit)
    updater = updater_of(
        cfg, Policy(theirs, None), None, Optimizer(theirs, cfg.trainer.optimizer, 9), tmp_path / "dump"
    )
    optimizer = example.make_optimizer(mine, lr=1e-3)
    for step, batch in enumerate((groups, groups[-1:])):
        converted = to_mtrl(batch)
        advantages = turn_advantages(converted, cfg.algorithm)
        samples = [s for group, a in zip(converted, advantages, strict=True) for s in group_samples(group, a)]
        report = updater.run(samples, step).report
        before = copy.deepcopy(mine.state_dict())
        result = example.update(mine, optimizer, batch_of(batch, credit))
    assert report.updates == 0 and result == (0.0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=0)


# Trained tokens


def test_recorded_log_probs_equal_those_of_a_forward_over_the_whole_episode(model, groups):
    for trajectory in chain(*groups):
        ids = example.token_ids(trajectory)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        place = 0
        for turn in trajectory:
            place += len(turn.observation_ids)
            expected = [logprobs[place + k - 1, i].item() for k, i in enumerate(turn.action_ids)]
            assert turn.logprobs == pytest.approx(expected, abs=1e-9)
            place += len(turn.action_ids)


def test_the_mask_selects_exactly_the_sampled_tokens(groups):
    trajectories = list(chain(*groups))
    batch = batch_of(groups, "turn")
    for trajectory, row in zip(trajectories, batch, strict=True):
        ids = example.token_ids(trajectory)
        assert row[: len(ids), 0].tolist() == ids
        assert not row[len(ids) :].any()
        assert row[row[:, 1] == 1, 0].tolist() == [i for turn in trajectory for i in turn.action_ids]
        assert row[row[:, 1] == 1, 2].tolist() == pytest.approx([lp for turn in trajectory for lp in turn.logprobs])


def test_observations_and_padding_are_not_trained(model, groups):
    """Log-probs and advantages at mask 0 do not change the gradient; the ids of observations do."""

    def gradient(batch):
        model.zero_grad()
        example.ppo_loss(model, batch).backward()
        return [p.grad.clone() for p in model.parameters()]

    batch = batch_of(groups, "turn")
    expected = gradient(batch)
    noisy = batch.clone()
    idle = batch[..., 1] == 0
    noisy[..., 2:][idle] = torch.randn(int(idle.sum()), 2, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(gradient(noisy), expected, strict=True))
    other = batch.clone()
    hint = batch[..., 0] == example.VOCABULARY.index("higher")
    other[..., 0][hint & idle] = example.VOCABULARY.index("lower")
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(gradient(other), expected, strict=True))


def test_episodes_contain_the_texts_of_environment_and_policy(groups):
    """The environment gets the decoded text, and a turn without an end is cut at the limit."""
    for secret, group in zip([2, 5, 7], groups[:-1], strict=True):
        for trajectory in group:
            game = example.GuessTheNumber(secret)
            observation = game.reset()
            for turn in trajectory:
                assert example.decode(turn.observation_ids) == observation
                assert example.END not in turn.action_ids[:-1]
                assert turn.action_ids[-1] == example.END or len(turn.action_ids) == example.MAX_TOKENS
                reward, observation, over = game.step(example.decode(turn.action_ids))
                assert reward == turn.reward
            assert over


# The game


def test_halving_the_range_always_wins():
    for secret in range(1, 8):
        game, low, high = example.GuessTheNumber(secret), 1, 7
        for _ in range(3):
            guess = (low + high) // 2
            reward, hint, over = game.step(str(guess))
            if over:
                break
            assert reward == 0.0
            low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
        assert reward == 1.0


@pytest.mark.parametrize("response", ["", "higher", "3 4", "3 3", "guess 3"])
def test_an_invalid_guess_has_a_negative_reward_and_the_game_ends_after_four_turns(response):
    game = example.GuessTheNumber(3)
    assert [game.step(response) for _ in range(4)] == [(-0.5, "what?", False)] * 3 + [(-0.5, "what?", True)]


# The program


@pytest.mark.slow
@pytest.mark.ci
def test_the_policy_learns_to_use_the_hints():
    """Random guesses would find 1 - (6/7)^4 = 46 % of the numbers."""
    torch.set_num_threads(1)
    model = example.make_model(seed=0)
    assert example.evaluate(model) < 0.1
    example.train(model, options(steps=100, group_size=32))
    assert example.evaluate(model) > 0.6


def test_the_program_prints_an_aligned_line_per_step_and_then_the_games(monkeypatch, capsys):
    monkeypatch.setattr(example, "GAMES", 14)

    def shown():
        command = "grpo_from_scratch.py --steps 2 --prompts 3 --group-size 4 --credit turn --lr 1e-3 --seed 5"
        monkeypatch.setattr(sys, "argv", command.split())
        example.main()
        return capsys.readouterr().out.splitlines()

    lines = shown()
    assert len({len(line) for line in lines[:3]}) == 1
    assert [line.split()[0] for line in lines[:3]] == ["step", "1", "2"]
    assert lines[4].startswith("success ") and "->" in lines[4]
    assert [line.partition(":")[0] for line in lines[6:]] == [f"secret {secret}" for secret in range(1, 8)]
    again = shown()
    assert again[:3] == lines[:3] and again[6:] == lines[6:]  # the same seed, the same run


@pytest.mark.parametrize("words", ["--group-size 1", "--prompts 0", "--steps -1"])
def test_sizes_without_a_comparison_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo_from_scratch.py", *words.split()])
    with pytest.raises(SystemExit):
        example.main()
    assert f"{words.split()[0]} must be at least" in capsys.readouterr().err


def test_the_example_is_short_and_imports_only_torch_and_transformers():
    source = Path(example.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 300
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
