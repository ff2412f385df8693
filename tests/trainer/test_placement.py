"""GPUs of servers: those that no rank trains on, or with `colocate` the ranks' own; and what servers need of the
machine besides. GPUs are simulated: only a machine with GPUs can show that NCCL and CUDA IPC work between them."""

import os
import resource
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config

from mtrl.command.compose import compose, merge
from mtrl.config.engine_schema import VllmConfig
from mtrl.config.overrides import normalise
from mtrl.distributed.world import World
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.server.versions import Versions
from mtrl.errors import UserError
from mtrl.trainer.setup import servers
from mtrl.trainer.setup.engine import colocated
from mtrl.trainer.setup.placement import has_copy, sent_device
from mtrl.trainer.setup.servers import check_servers, server_devices, training_gpus, turns_at_once


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

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
            "need 1 GPUs, and this machine has 1, of which there are 0 beside the 1 that ranks train on; start",
        ),
        (
            2,
            2,
            VllmConfig(replicas=3, colocate=True),
            "need 3 GPUs, and this machine has 2, of which there are 2 that ranks train",
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


def test_the_number_of_visible_gpus_counts(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-1")
    with pytest.raises(UserError, match="names GPU 2, and CUDA_VISIBLE_DEVICES=4,GPU-1 shows 2; name indices from 0"):
        server_devices("vllm", VllmConfig(devices=[2]), 1)


def config_of(*words):
    served = ["experiment=gsm8k", "generator=vllm", "generator.vllm.python=/bin/true"]
    return OmegaConf.to_object(compose([*served, *words]))


@pytest.mark.parametrize(
    ("count", "ranks", "words", "replica"),
    [
        (2, 1, [], "replica 0 sees only 1; use generator.vllm.weight_sync=distributed, or disk, or one replica"),
        (4, 4, ["replicas=2", "tensor_parallel_size=2", "colocate=true"], "replica 1 sees only 2, 3; use .*=disk, or"),
    ],
)
def test_cuda_ipc_needs_servers_that_see_the_gpu_of_rank_0(gpus, count, ranks, words, replica):
    gpus(count)
    words = ["generator.vllm.weight_sync=tensor", *(f"generator.vllm.{word}" for word in words)]
    with pytest.raises(UserError, match=f"generator.vllm.weight_sync=tensor shares weights on GPU 0, and {replica}"):
        check_servers(config_of(*words), World(0, ranks))


def test_servers_that_see_the_gpu_of_rank_0_are_accepted(gpus):
    gpus(4)
    tensor = "generator.vllm.weight_sync=tensor"
    shared = ["generator.vllm.colocate=true", "generator.vllm.tensor_parallel_size=4"]
    check_servers(config_of(tensor, *shared), World(0, 4))
    adapters = ["model.lora_rank=8", "generator.vllm.lora=adapter"]
    check_servers(config_of(tensor, *adapters), World())  # adapters are sent by files


def test_different_versions_of_nccl_are_an_error(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(servers, "own_versions", lambda: Versions("2.15.0+cu130", "2.30.7"))
    monkeypatch.setattr(servers, "versions_of", lambda python: Versions("2.13.0+cu130", "2.29.7"))
    config = config_of("generator.vllm.weight_sync=distributed")
    with pytest.raises(
        UserError,
        match=r"the trainer has NCCL 2\.30\.7 \(torch 2\.15\.0\+cu130\), vllm has 2\.29\.7 .*; "
        r"run pip install torch==2\.13\.0 for the trainer, or use generator\.vllm\.weight_sync=disk",
    ):
        check_servers(config, World())
    monkeypatch.setattr(servers, "own_versions", lambda: Versions("2.13.0", "2.29.7"))
    check_servers(config, World())


def test_an_interpreter_without_torch_is_an_error(gpus):
    gpus(2)
    config = config_of("generator.vllm.weight_sync=distributed", "generator.vllm.python=/bin/false")
    with pytest.raises(UserError, match="torch cannot be compared with those of vllm: /bin/false ended with status 1"):
        check_servers(config, World())


def test_a_file_limit_below_the_turns_in_flight_is_an_error():
    config = config_of("generator.vllm.replicas=8", "generator.max_num_seqs=256")
    child = os.fork()
    if not child:  # a hard limit cannot be raised again
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
            check_servers(config, World())
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512 + 8 * (16 + 320), 4096)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
            with pytest.raises(UserError, match="256 on 8 servers of vllm needs 3200 open files, .* may open 1024 "):
                check_servers(config, World())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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


@pytest.mark.parametrize(
    "backend, words, stays",
    [
        ("local", ["trainer.fsdp.param_dtype=bfloat16"], True),
        ("local", ["generator.local.process=true"], False),
        ("local", ["rollouts.workers=2"], False),
        ("vllm", [], False),
    ],
)
def test_weights_stay_on_the_gpu_for_an_engine_that_copies_from_it(backend, words, stays):
    """Servers' weights are kept for restarts, for which a GPU has no room."""
    config = OmegaConf.to_object(compose(words))
    config.generator.backend = backend
    cuda = torch.device("cuda", 1)
    assert sent_device(config, cuda) == (cuda if stays else None)
    assert sent_device(config, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("words", "copies", "frees"),
    [
        (["trainer.fsdp.param_dtype=bfloat16"], True, True),
        ([], False, False),
        (["async_config.max_steps_off_policy=1", "generator.local.process=false"], True, False),
        (["model.lora_rank=4"], True, False),
    ],
)
def test_a_local_engine_frees_a_copy_that_no_turn_and_no_adapter_needs(tiny_model, words, copies, frees):
    config, engine = OmegaConf.to_object(compose(words)), LocalEngine(tiny_model, None)
    assert has_copy(config, World()) == copies
    assert colocated(config, engine, copies) is (engine if frees else None)
