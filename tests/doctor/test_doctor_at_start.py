"""The line about memory at the start of a run."""

import sys

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.command.compose import merge
from mtrl.doctor.at_start import plan_at_start

GIB = 2**30
CPU = (
    "model.device=cpu",
    "generator.max_context_length=2048",
    "generator.max_num_seqs=8",
    "trainer.max_tokens_per_microbatch=2048",
)


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


@pytest.mark.parametrize("path", ["owner/none", "/none", "./none", "none", "no where/none"])
def test_a_run_of_an_unknown_model_says_that_it_is_not_planned(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    notes = []
    config = OmegaConf.to_object(merge(["model=hf", f"model.path={path}"]))
    plan_at_start(config, notes.append, None)
    assert notes[0].startswith(f"memory is not planned: model.path={path} is neither")


@pytest.mark.parametrize(
    ("free", "shown_as", "start"),
    [(60, "note", "memory: fits"), (8, "warning", "memory: does not fit: the main memory of rank 0 is")],
)
def test_a_run_on_a_cpu_starts_with_the_plan_of_main_memory(free, shown_as, start, monkeypatch):
    monkeypatch.setattr("mtrl.doctor.at_start.memory", lambda: (64 * GIB, free * GIB))
    lines = []
    config = OmegaConf.to_object(merge(["experiment=gsm8k", "model=qwen3_0_6b", *CPU]))
    plan_at_start(config, lambda line: lines.append(("note", line)), lambda line: lines.append(("warning", line)))
    ((kind, line),) = lines
    assert kind == shown_as and line.startswith(start) and "GPU" not in line


def test_runs_whose_memory_is_not_planned(monkeypatch):
    monkeypatch.setenv("MTRL_VLLM_PYTHON", sys.executable)
    for overrides in (["experiment=gsm8k"], ["experiment=sop_hf", "model.device=cpu", "generator=vllm"]):
        plan_at_start(OmegaConf.to_object(merge(overrides)), None, None)
    monkeypatch.setattr("mtrl.doctor.at_start.memory", lambda: None)  # a system without /proc
    plan_at_start(OmegaConf.to_object(merge(["experiment=gsm8k", "model=qwen3_0_6b", "model.device=cpu"])), None, None)
