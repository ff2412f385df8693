"""The update: effect of a training step on the weights, and errors for numbers that are not finite."""

import copy
import math
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from alone import updater_of
from helpers import make_group

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.errors import UserError
from mtrl.trainer.data.batching import micro_batches, mini_batches
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.flops import model_flops
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.update.optimizer import Optimizer, lr_scale
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update import Updater
from mtrl.trainer.update.update_report import UpdateReport


def config(**algorithm):
    cfg = Config(run_dir="unused")
    cfg.algorithm = replace(cfg.algorithm, **algorithm)
    cfg.trainer.optimizer = OptimizerConfig(lr=1e-2)
    return cfg


def samples_of(groups, cfg):
    return [s for g in groups for s in group_samples(g, turn_advantages([g], cfg.algorithm)[0])]


def test_the_attention_mask_covers_observations(make_tiny_model, tmp_path):
    """The log-prob of a sampled token depends on the untrained tokens of the environment before it."""
    model = make_tiny_model(3)
    group = make_group(1, model.config.vocab_size, size=1, turns=1)
    (sample,) = group_samples(group, [[1.0] * len(group.trajectories[0].turns)])
    changed = copy.deepcopy(sample)
    changed.token_ids[0] = (changed.token_ids[0] + 1) % model.config.vocab_size
    weights = [np.ones(len(sample.token_ids))]
    before, after = (Policy(model, None).logprobs(micro_batches([s], weights, 99)[0])[0] for s in (sample, changed))
    assert (before - after).abs().min() > 1e-6


def test_a_filler_counts_as_padding_in_the_work_of_its_rank(make_tiny_model, tmp_path):
    cfg, model = config(loss_anchor="old"), make_tiny_model()
    (sample, *_) = samples_of([make_group(1, model.config.vocab_size)], cfg)

    def works(ranks):
        learners = Learners(Ranks(ranks), model_flops(model))
        return Updater(cfg, learners, tmp_path / "dump").run([sample], 0).works

    (alone,), (busy, idle) = works(1), works(2)
    assert busy == alone and alone.tokens == len(sample.token_ids)
    assert (idle.tokens, idle.flops, idle.cells) == (0, 0.0, alone.cells)


class Ranks:
    """Stand-in for a rank group: every rank reports without a computation."""

    def __init__(self, size):
        self.world = SimpleNamespace(size=size)

    def run(self, method, shares, *common):
        return [
            UpdateReport(first_logprobs=[batch.rollout_logprobs for batch in parts[0] if not batch.is_filler])
            for (parts,) in shares
        ]


def test_mini_batches_contain_every_group_once_per_epoch(make_tiny_model, tmp_path):
    cfg = config()
    cfg.trainer.mini_batches, cfg.trainer.update_epochs = 2, 3
    model = make_tiny_model()
    updater = updater_of(cfg, Policy(model, None), None, Optimizer(model, cfg.trainer.optimizer, 9), tmp_path / "dump")
    groups = [make_group(seed, model.config.vocab_size) for seed in range(5)]
    samples = samples_of(groups, cfg)
    parts = mini_batches(samples, cfg.trainer, cfg.seed, 0)
    assert len(parts) == 6
    for epoch in range(3):
        group_ids = [s.group_id for part in parts[2 * epoch : 2 * epoch + 2] for s in part]
        assert sorted(group_ids) == sorted(s.group_id for s in samples)
    assert updater.run(samples, 0).report.updates == 6


def test_an_update_raises_the_log_probs_of_good_turns(make_tiny_model, tmp_path):
    cfg = config()
    model = make_tiny_model(5)
    policy = Policy(model, None)
    samples = samples_of([make_group(7, model.config.vocab_size)], cfg)
    weights = [np.ones(len(s.token_ids)) for s in samples]
    (batch,) = micro_batches(samples, weights, 10_000)
    for sample, row in zip([samples[r] for r in batch.rows], batch.rows, strict=True):  # on-policy log-probs
        assert sample is samples[row]
    before = policy.logprobs(batch)[0].detach()
    batch_of = dict(zip(batch.rows, range(len(batch.rows)), strict=True))
    start = 0
    for row in batch_of:
        count = samples[row].action_tokens
        values = iter(before[start : start + count].tolist())
        samples[row].logprobs = [next(values) if m else 0.0 for m in samples[row].loss_mask]
        start += count
    report = (
        updater_of(cfg, policy, None, Optimizer(model, cfg.trainer.optimizer, 9), tmp_path / "d").run(samples, 0).report
    )
    gain = policy.logprobs(batch)[0].detach() - before
    assert (gain * batch.advantages).sum() > 0
    metrics = report.metrics()
    assert metrics["analysis/logprob_drift/max"] < 1e-5 and metrics["train/grad_norm"] > 0


def test_the_kl_term_pulls_back_to_the_reference(make_tiny_model, tmp_path):
    cfg = config(kl_loss_coef=10.0, kl_estimator="k2")
    model, reference = make_tiny_model(1), make_tiny_model(2).requires_grad_(False)
    group = make_group(3, model.config.vocab_size)
    for turn in (turn for t in group.trajectories for turn in t.turns):
        turn.reward = 1.0  # no advantage: only the KL moves the weights
    samples = samples_of([group], cfg)
    updater = updater_of(
        cfg,
        Policy(model, None),
        Policy(reference, None),
        Optimizer(model, OptimizerConfig(lr=3e-3), 99),
        tmp_path / "d",
    )
    kls = [updater.run(samples, step).report.metrics()["train/kl"] for step in range(12)]
    assert kls[-1] < 0.7 * kls[0]


@pytest.mark.parametrize("estimator", ["k1_unbiased", "k3_unbiased"])
def test_a_kl_with_a_ratio_corrects_for_the_policy_that_sampled(make_tiny_model, tmp_path, estimator):
    """The anchor of the policy's loss, which has no gradient here, does not change the gradient of the KL."""
    reference = make_tiny_model(2).requires_grad_(False)
    group = make_group(3, reference.config.vocab_size)  # its log-probs are those of no model at hand
    for turn in (turn for t in group.trajectories for turn in t.turns):
        turn.reward = 0.0  # no advantage
    found = {}
    for anchor in ("rollout", "old"):
        cfg, model = config(kl_loss_coef=1.0, kl_estimator=estimator, loss_anchor=anchor), make_tiny_model(1)
        optimizer = Optimizer(model, OptimizerConfig(lr=3e-3), 99)
        updater = updater_of(cfg, Policy(model, None), Policy(reference, None), optimizer, tmp_path / "d")
        metrics = updater.run(samples_of([group], cfg), 1).report.metrics()
        found[anchor] = metrics["train/kl"], metrics["train/grad_norm"]
    assert found["old"] == found["rollout"]


def test_a_non_finite_loss_raises_and_writes_the_batch(make_tiny_model, tmp_path):
    cfg = config()
    model = make_tiny_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    samples = samples_of([make_group(0, model.config.vocab_size)], cfg)
    samples[0].advantages = [math.nan] * len(samples[0].advantages)
    updater = updater_of(
        cfg, Policy(model, None), None, Optimizer(model, cfg.trainer.optimizer, 9), tmp_path / "dump.jsonl"
    )
    with pytest.raises(UserError, match=r"the loss is nan at step 5; the batch is in .*dump\.jsonl"):
        updater.run(samples, 4)
    assert len((tmp_path / "dump.jsonl").read_text().splitlines()) == len(samples)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_non_finite_gradient_does_not_change_the_weights(make_tiny_model):
    model = make_tiny_model()
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-2), 9)
    before = [p.detach().clone() for p in optimizer.parameters]
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, math.inf)
    norm, _ = optimizer.step(0)
    assert not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.parameters, strict=True))


def test_schedules():
    (choices,) = (each.metadata["choices"] for each in fields(OptimizerConfig) if each.name == "schedule")
    scales = {s: [lr_scale(OptimizerConfig(schedule=s, warmup_steps=2), step, 6) for step in range(7)] for s in choices}
    assert scales.keys() == {"constant", "linear", "cosine"}
    assert scales["constant"] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert scales["linear"] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert scales["cosine"][2:] == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert lr_scale(OptimizerConfig(schedule="linear", min_lr_ratio=0.1), 10, 10) == pytest.approx(0.1)


def test_the_optimizer_state_can_be_restored_from_tensors(make_tiny_model):
    def steps(model, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for parameter in optimizer.parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(seed)

    straight, stopped = make_tiny_model(), make_tiny_model()
    first = Optimizer(straight, OptimizerConfig(lr=1e-2), 9)
    steps(straight, first, range(6))
    second = Optimizer(stopped, OptimizerConfig(lr=1e-2), 9)
    steps(stopped, second, range(3))
    third = Optimizer(stopped, OptimizerConfig(lr=1e-2), 9)
    third.load({name: value.clone() for name, value in second.state().items()})
    steps(stopped, third, range(3, 6))
    for a, b in zip(straight.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_entropy_bonus_raises_the_entropy(make_tiny_model, tmp_path):
    model = make_tiny_model(6)
    group = make_group(3, model.config.vocab_size)
    for turn in (turn for t in group.trajectories for turn in t.turns):
        turn.reward = 1.0  # no advantage: only the entropy moves the weights
    cfg = config(entropy_coef=1.0)
    samples = samples_of([group], cfg)
    weights = [np.ones(len(s.token_ids)) for s in samples]
    assert not Policy(model, None).logprobs(micro_batches(samples, weights, 999)[0])[1].requires_grad
    policy = Policy(model, None, entropy_gradient=True)
    updater = updater_of(cfg, policy, None, Optimizer(model, OptimizerConfig(lr=3e-3), 99), tmp_path / "d")
    entropies = [updater.run(samples, step).report.metrics()["train/entropy"] for step in range(8)]
    assert entropies[-1] > entropies[0] + 0.05
