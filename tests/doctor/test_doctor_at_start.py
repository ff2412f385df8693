"""The line about memory at the start of a run on GPUs."""

import sys

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.command.compose import merge
from mtrl.doctor.at_start import plan_at_start

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "shown_as", "start"), [(79, "note", "memory: fits"), (20, "warning", "memory: does not")]
)
def test_a_run_on_a_gpu_starts_with_its_plan(free, shown_as, start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("MTRL_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    lines = []
    config = OmegaConf.to_object(merge(["experiment=sop_hf"]))
    plan_at_start(config, lambda line: lines.append(("note", line)), lambda line: lines.append(("warning", line)))
    ((kind, line),) = lines
    assert kind == shown_as and line.startswith(start) and "\n" not in line


def test_a_run_of_an_unknown_model_says_that_it_is_not_planned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    notes = []
    config = OmegaConf.to_object(merge(["model=hf", "model.path=owner/none"]))
    plan_at_start(config, notes.append, None)
    assert notes[0].startswith("memory is not planned: model.path=owner/none is neither")


def test_a_run_on_a_cpu_has_no_plan():
    plan_at_start(OmegaConf.to_object(merge(["experiment=sop_hf", "model.device=cpu"])), None, None)
