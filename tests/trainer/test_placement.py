"""GPUs of servers: those that no rank trains on, or with `colocate` the ranks' own."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config

from mtrl.command.compose import merge
from mtrl.config.engine_schema import VllmConfig
from mtrl.config.overrides import normalise
from mtrl.errors import UserError
from mtrl.trainer.setup.servers import server_devices, training_gpus, turns_at_once


@pytest.fixture
def gpus(monkeypatch):
    def shown(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return shown


@pytest.mark.parametrize(
    ("count", "trainers", "settings", "expected"),
    [
        (4, 3, VllmConfig(), [3]),
        (8, 4, VllmConfig(replicas=2, tensor_parallel_size=2), [4, 5, 6, 7]),
        (4, 4, VllmConfig(replicas=4, colocate=True), [0, 1, 2, 3]),
        (2, 1, VllmConfig(devices=[0]), [0]),
        (4, 3, VllmConfig(urls=["http://127.0.0.1:1"]), None),
        (0, 0, VllmConfig(replicas=2), None),
    ],
)
def test_servers_use_the_last_gpus(gpus, count, trainers, settings, expected):
    gpus(count)
    assert server_devices("vllm", settings, trainers) == expected


@pytest.mark.parametrize(
    ("count", "trainers", "settings", "message"),
    [
        (
            1,
            1,
            VllmConfig(),
            "need 1 GPUs, and of this machine's 1 there are 0 beside the 1 that ranks train on; start",
        ),
        (
            2,
            2,
            VllmConfig(replicas=3, colocate=True),
            "need 3 GPUs, and of this machine's 2 there are 2 that ranks train",
        ),
        (
            2,
            1,
            VllmConfig(devices=[2]),
            r"generator.vllm.devices=\[2\] names GPU 2, and this machine has 2; name indices from 0 to 1",
        ),
    ],
)
def test_too_few_gpus_are_an_error(gpus, count, trainers, settings, message):
    gpus(count)
    with pytest.raises(UserError, match=message):
        server_devices("vllm", settings, trainers)


def test_the_number_of_gpus_that_ranks_train_on(monkeypatch):
    cuda = torch.device("cuda", 2)
    assert training_gpus(1, torch.device("cpu")) == 0
    assert training_gpus(1, torch.device("cuda")) == 1
    assert training_gpus(1, cuda) == 3
    assert training_gpus(4, cuda) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert training_gpus(16, cuda) == 8


@pytest.mark.parametrize(("memory", "context", "expected"), [(80, 16384, 79), (80, 1024, 512), (24, 16384, 32)])
def test_servers_sample_as_many_turns_at_once_as_their_memory_holds(gpus, monkeypatch, memory, context, expected):
    """A server of Qwen3-8B in bfloat16 needs 2.25 GiB for keys and values of 16,384 tokens."""
    gpus(1)
    properties = SimpleNamespace(total_memory=memory * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("mtrl.trainer.setup.servers.parameters_of", lambda shape: 8_190_735_360)
    words = ["model=qwen3_8b", "generator=vllm", "model.dtype=bfloat16", "generator.gpu_memory_utilization=0.8"]
    config = OmegaConf.to_object(merge(normalise(words)))
    sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape = Qwen3Config(**sizes, head_dim=128, intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False)
    assert turns_at_once(config, shape, context) == expected
    config.generator.max_num_seqs = 7
    assert turns_at_once(config, shape, context) == 7


def test_servers_on_a_cpu_sample_128_turns_at_once(gpus):
    gpus(0)
    config = OmegaConf.to_object(merge(normalise(["model=qwen3_8b", "generator=vllm"])))
    assert turns_at_once(config, None, 1024) == 128
