"""Hints about adapters."""

import pytest

from mtrl.command.compose import merge
from mtrl.command.hints import hints
from mtrl.config.keys import plain
from mtrl.config.overrides import normalise

HF = ("model=hf", "model.path=owner/name")


def said(*overrides):
    cfg = merge(normalise(list(overrides)))
    return hints(cfg, plain(cfg))


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["model.lora_alpha=64"], "model.lora_alpha=64 has no effect with model.lora_rank=0"),
        (
            ["model.lora_target_modules=[q_proj]"],
            "model.lora_target_modules=[q_proj] has no effect with model.lora_rank=0",
        ),
        (
            [*HF, "model.lora_rank=32", "trainer.optimizer.lr=1e-6"],
            "trainer.optimizer.lr=1e-06 is low for adapters (model.lora_rank=32), which take about ten times the rate "
            "of full training (LoRA Without Regret, 2025), usually 1e-5",
        ),
        (
            [*HF, "model.lora_rank=32", "trainer.optimizer.lr=0.01"],
            "trainer.optimizer.lr=0.01 is high for adapters (model.lora_rank=32) of a pretrained model, which usually "
            "take 1e-5",
        ),
        (
            ["model.lora_rank=1", "model.lora_alpha=64"],
            "model.lora_alpha=64 and model.lora_rank=1 scale the adapters by lora_alpha / lora_rank, "
            "and a factor of 1 or 2 is usual; set model.lora_alpha to 1 or 2 times the rank",
        ),
        (
            ["model.lora_rank=64", "model.lora_alpha=1"],
            "model.lora_alpha=1 and model.lora_rank=64 scale the adapters by lora_alpha / lora_rank, "
            "and a factor of 1 or 2 is usual; set model.lora_alpha to 1 or 2 times the rank",
        ),
    ],
)
def test_warned(overrides, hint):
    assert said(*overrides) == [hint]


@pytest.mark.parametrize(
    "overrides",
    [
        [*HF, "model.lora_rank=64", "model.lora_alpha=128", "trainer.optimizer.lr=1e-5"],
        [*HF, "model.lora_rank=1", "model.lora_alpha=32", "trainer.optimizer.lr=2e-4"],
        [*HF, "model.lora_rank=16", "model.lora_target_modules=[q_proj,v_proj]", "trainer.optimizer.lr=5e-6"],
        [*HF, "trainer.optimizer.lr=1e-6"],
    ],
)
def test_usual_settings_are_not_warned_about(overrides):
    assert said(*overrides) == []
