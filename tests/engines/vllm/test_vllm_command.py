"""From settings to vLLM's command line."""

import json

import pytest

from mtrl.config.engine_schema import VllmConfig
from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.vllm.command import OURS, vllm_command
from mtrl.errors import UserError
from tests.engines.launches import GPUS, TOKEN, launch


def command(settings=None, place=GPUS, **changes):
    return vllm_command(launch(settings or VllmConfig(), **changes), place)


def value(argv, name):
    """Return the value of an argument."""
    return argv[list(argv).index(name) + 1]


def test_settings_become_arguments_of_vllm():
    argv = command(VllmConfig(tensor_parallel_size=2)).argv
    assert argv[:3] == ["/env/bin/python", "-m", "mtrl.engines.vllm.serve"]
    message = {
        "--model": "/models/policy",
        "--host": "127.0.0.1",
        "--port": "1234",
        "--dtype": "bfloat16",
        "--max-model-len": "2048",
        "--max-num-seqs": "8",
        "--gpu-memory-utilization": "0.6",
        "--tensor-parallel-size": "2",
        "--generation-config": "vllm",
    }
    assert {name: value(argv, name) for name in message} == message
    assert "--enable-prefix-caching" in argv
    assert not {"--enforce-eager", "--enable-lora", "--enable-sleep-mode", "--kv-cache-memory-bytes"} & set(argv)


def test_without_a_gpu_memory_is_limited_and_nothing_is_compiled():
    found = command(is_cpu=True)
    assert {"--enforce-eager", "--kv-cache-memory-bytes"} <= set(found.argv)
    assert "--gpu-memory-utilization" not in found.argv
    assert found.env["TORCHDYNAMO_DISABLE"] == "1" and found.env["OMP_NUM_THREADS"] == "1"
    assert value(found.argv, "--distributed-executor-backend") == "uni"
    assert "uni" not in command(VllmConfig(tensor_parallel_size=2), is_cpu=True).argv


def test_boolean_settings_become_flags():
    argv = command(VllmConfig(prefix_caching=False, colocate=True), max_lora_rank=9).argv
    assert "--no-enable-prefix-caching" in argv and "--enable-sleep-mode" in argv
    assert "--enable-lora" in argv and value(argv, "--max-lora-rank") == "16"


def test_additional_arguments_override_settings_in_any_spelling():
    args = {
        "max_num_batched_tokens": 4096,
        "--max-num-seqs": 3,
        "enable_chunked_prefill": False,
        "async-scheduling": True,
        "generation_config": None,
        "speculative_config": {"method": "ngram"},
        "allowed_origins": ["a", "b"],
    }
    argv = command(VllmConfig(args=args)).argv
    assert value(argv, "--max-num-batched-tokens") == "4096"
    assert value(argv, "--max-num-seqs") == "3" and argv.count("--max-num-seqs") == 1
    assert {"--no-enable-chunked-prefill", "--async-scheduling"} <= set(argv)
    assert "--generation-config" not in argv
    assert json.loads(value(argv, "--speculative-config")) == {"method": "ngram"}
    assert argv[argv.index("--allowed-origins") + 1 :][:2] == ["a", "b"]


@pytest.mark.parametrize("name", [*OURS, "pipeline_parallel_size"])
def test_reserved_arguments_are_refused(name):
    with pytest.raises(UserError, match=f"generator.vllm.args has {name}, which cannot be set: .+; remove it"):
        command(VllmConfig(args={f"--{name.replace('_', '-')}": "x"}))


def test_a_lora_rank_that_is_too_large_is_refused():
    with pytest.raises(UserError, match="model.lora_rank=1000"):
        command(max_lora_rank=1000)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_ranks_use_loopback_unless_a_network_is_configured(is_cpu):
    assert command(is_cpu=is_cpu).env["GLOO_SOCKET_IFNAME"] == "lo"
    assert command(VllmConfig(env={"GLOO_SOCKET_IFNAME": "eth0"}), is_cpu=is_cpu).env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_token_is_only_in_the_environment():
    found = command(VllmConfig(env={"MTRL_SERVER_TOKEN": "another", "HF_HOME": "/cache"}))
    assert not any(TOKEN in word for word in found.argv)
    assert found.env["MTRL_SERVER_TOKEN"] == TOKEN and found.env["HF_HOME"] == "/cache"


def test_the_server_sees_only_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert command().env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in command(place=ServerPlace(1234, TOKEN)).env
    assert command(is_cpu=True).env["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-1,7")
    assert command().env["CUDA_VISIBLE_DEVICES"] == "GPU-1,7"
