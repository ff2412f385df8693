"""Updates of a mixture of experts: metrics of the routers, and the loss that balances experts."""

import logging
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from alone import updater_of
from helpers import make_group
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from mtrl.config.schema import Config
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update_report import UpdateReport

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 8, "moe_intermediate_size": 16}


def mixture():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, initializer_range=0.5))


def samples_without_advantage():
    group = make_group(3, SIZES["vocab_size"])
    return group_samples(group, [[0.0] * len(t.turns) for t in group.trajectories])


def config(tokens=999, **algorithm):
    cfg = Config(run_dir="unused")
    cfg.algorithm = replace(cfg.algorithm, **algorithm)
    cfg.trainer.max_tokens_per_microbatch = tokens
    return cfg


def updater(cfg, model, tmp_path, lr=0.0):
    policy = Policy(model, None)
    return updater_of(cfg, policy, None, Optimizer(model, OptimizerConfig(lr=lr), 99), tmp_path / "dump")


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"])
def test_the_loss_is_that_of_the_sampled_tokens_of_the_step(reduction, tmp_path):
    """With one sample in each micro-batch it is the mean of Transformers' loss, weighted by the sampled tokens."""
    more = {"max_sequence_length": 100} if reduction.endswith("_norm") else {}
    cfg, model = config(tokens=1, expert_balance_coef=0.5, loss_reduction=reduction, **more), mixture()
    samples = samples_without_advantage()
    losses = []
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample.token_ids[:-1]]), output_router_logits=True).router_logits
        losses.append(load_balancing_loss_func(logits, 8, 2, torch.tensor([sample.loss_mask[1:]])).item())
    sampled = [sum(sample.loss_mask) for sample in samples]
    expected = sum(loss * count for loss, count in zip(losses, sampled, strict=True)) / sum(sampled)
    report = updater(cfg, model, tmp_path).run(samples, 0).report
    assert report.metrics()["train/loss"] == pytest.approx(0.5 * expected, rel=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_loss_balances_the_experts(recomputed, tmp_path):
    cfg, model = config(expert_balance_coef=1.0), mixture()
    if recomputed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    update, samples = updater(cfg, model, tmp_path, lr=1e-2), samples_without_advantage()
    metrics = [update.run(samples, step).report.metrics() for step in range(12)]
    losses, busiest = ([row[key] for row in metrics] for key in ("train/loss", "train/experts/busiest"))
    assert fmean(losses[-3:]) < 2.1 < losses[0]  # 2 choices of a token: 2 is balanced
    assert fmean(busiest[-3:]) < busiest[0]
    assert metrics[-1]["train/experts/unused"] == 0.0


def test_it_is_off_by_default_and_experts_are_counted_all_the_same(tmp_path):
    cfg, model = config(drop_zero_advantage=False), mixture()
    report = updater(cfg, model, tmp_path).run(samples_without_advantage(), 0).report
    metrics = report.metrics()
    assert metrics["train/loss"] == 0.0
    assert 1.0 <= metrics["train/experts/busiest"] <= 4.0
    assert report.expert_tokens.sum() == 2 * metrics["train/tokens"]


def test_counts_of_ranks_are_added():
    one, other = UpdateReport(), UpdateReport()
    one.count_experts(torch.tensor([[1.0, 3], [0, 2]]))
    other.count_experts(torch.tensor([[1.0, 0], [0, 0]]))
    joined = UpdateReport.joined([one, other, UpdateReport()])
    assert joined.expert_tokens.tolist() == [[2, 3], [0, 2]] and one.expert_tokens.tolist() == [[1, 3], [0, 2]]


def test_a_dense_model_is_named_in_a_warning(make_tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        updater(config(expert_balance_coef=0.1), make_tiny_model(), tmp_path)
    assert "algorithm.expert_balance_coef=0.1 has no effect" in caplog.text
