"""Weights of the servers of an evaluation. tests/engines/real/test_engine_runs.py starts real servers."""

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.schema import VllmConfig
from mtrl.engines.local.engine import LocalEngine
from mtrl.environments.factory import load_task
from mtrl.evaluation.ready_models import served_model
from mtrl.evaluation.sources import source_of
from mtrl.evaluation.weights import load
from mtrl.trainer.loading import load_model
from tests.evaluation.conftest import TASK


@pytest.fixture
def started(monkeypatch):
    """The configuration of each started server, and its weights at that time."""
    found = []

    def start(config, world, path, shape, context, logs):
        model, tokenizer = load_model(config, path)
        assert model.config.vocab_size == shape.vocab_size
        found.append((config, {name: value.clone() for name, value in model.state_dict().items()}))
        return LocalEngine(model, tokenizer, 4, context)

    monkeypatch.setattr("mtrl.trainer.setup.servers.server_engine", start)
    return found


@pytest.mark.parametrize("which", ["export", "checkpoints/latest", "checkpoints/step_000001"])
def test_servers_start_with_the_weights_of_the_model(run, started, which, tmp_path):
    source = source_of(f"{run}/{which}")
    config = OmegaConf.to_object(compose([*TASK, f"run_dir={tmp_path}"]))
    task = load_task(config)
    expected = load(source, config)[0].state_dict()
    generator = replace(config.generator, backend="vllm", vllm=VllmConfig(colocate=True))
    served = replace(config, generator=generator)
    model = served_model(source, served, task, task.splits.test, tmp_path)
    ((given, weights),) = started
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert model.engine.version == source.step > 0
    assert (given.model.device, given.generator.vllm.colocate) == ("cpu", False), "no training shares the GPUs"


def test_servers_with_weights_of_their_own_are_refused(run, refused):
    words = ["generator.backend=vllm", "generator.vllm.urls=[http://127.0.0.1:1]"]
    error = refused(f"{run}/export", *words)
    assert "generator.vllm.urls names running servers" in error
    assert "set generator.vllm.urls=[], or evaluate the running model with evaluation.model=MODEL@" in error
