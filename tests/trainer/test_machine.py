"""Settings that follow from the machine: the dtype of passes, said at the start and stored in the configuration."""

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.trainer.loading import compute_dtype
from mtrl.trainer.setup import machine
from mtrl.trainer.setup.machine import machine_note, with_machine_settings


def resolved(monkeypatch, words, multiplies=True):
    monkeypatch.setattr(machine, "multiplies", lambda dtype: multiplies)
    config = OmegaConf.to_object(compose(["model.device=cpu", *words]))
    return config, with_machine_settings(config)


@pytest.mark.parametrize(
    ("words", "multiplies", "dtype"),
    [
        (["model=hf", "model.path=x"], True, torch.bfloat16),
        (["model=hf", "model.path=x"], False, torch.float32),
        (["model=hf", "model.path=x", "trainer.fsdp.param_dtype=float32"], True, torch.float32),
        (["model=hf", "model.path=x", "model.dtype=bfloat16"], True, torch.bfloat16),
        (["model=tiny"], True, torch.float32),
    ],
)
def test_pretrained_models_compute_in_bfloat16_where_the_processor_multiplies_it(monkeypatch, words, multiplies, dtype):
    given, chosen = resolved(monkeypatch, words, multiplies)
    assert compute_dtype(chosen) == dtype
    assert chosen.model.dtype == given.model.dtype
    assert with_machine_settings(chosen) == chosen


def test_the_choice_is_said_and_names_the_key_that_changes_it(monkeypatch):
    note = machine_note(*resolved(monkeypatch, ["model=hf", "model.path=x"]))
    assert "in bfloat16" in note and "trainer.fsdp.param_dtype=float32" in note
    assert machine_note(*resolved(monkeypatch, ["model=tiny"])) is None


@pytest.mark.parametrize("words", [["model.dtype=bfloat16"], ["trainer.fsdp.param_dtype=bfloat16"]])
def test_a_dtype_without_instructions_is_said_to_be_slow(monkeypatch, words):
    words = ["model=hf", "model.path=x", *words]
    note = machine_note(*resolved(monkeypatch, words, multiplies=False))
    assert "in bfloat16, for which this CPU has no instructions" in note
    assert "trainer.fsdp.param_dtype=float32" in note
    assert machine_note(*resolved(monkeypatch, words, multiplies=True)) is None
