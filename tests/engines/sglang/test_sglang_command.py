"""From settings to SGLang's command line."""

import pytest

from mtrl.config.engine_schema import SglangConfig
from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.sglang.command import OURS, sglang_command
from mtrl.errors import UserError
from tests.engines.launches import GPUS, TOKEN, launch


def command(settings=None, place=GPUS, **changes):
    return sglang_command(launch(settings or SglangConfig(), **changes), place)


def value(argv, name):
    """Return the value of an argument, None if it is missing or a flag without a value."""
    at = list(argv).index(name) if name in argv else len(argv)
    following = [*argv[at + 1 :], "--"][0]
    return None if following.startswith("--") else following


def test_settings_become_arguments_of_sglang():
    argv = command(SglangConfig(tensor_parallel_size=2)).argv
    assert argv[:3] == ["/env/bin/python", "-m", "mtrl.engines.sglang.serve"]
    message = {
        "--model-path": "/models/policy",
        "--host": "127.0.0.1",
        "--port": "1234",
        "--dtype": "bfloat16",
        "--context-length": "2048",
        "--max-running-requests": "8",
        "--mem-fraction-static": "0.6",
        "--tp-size": "2",
        "--weight-version": "0",
        "--sampling-defaults": "openai",
    }
    assert {name: value(argv, name) for name in message} == message
    assert "--enable-cache-report" in argv
    assert "--disable-radix-cache" not in argv and "--device" not in argv and "--enable-lora" not in argv


def test_the_server_sees_only_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert command().env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in command(place=ServerPlace(1234, TOKEN)).env
    assert command(is_cpu=True).env["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-1,7")
    assert command().env["CUDA_VISIBLE_DEVICES"] == "GPU-1,7"


def test_without_a_gpu_the_server_uses_plain_pytorch_on_one_thread():
    found = command(is_cpu=True)
    assert value(found.argv, "--device") == "cpu"
    assert value(found.argv, "--attention-backend") == "torch_native"
    assert value(found.argv, "--max-total-tokens") == str(8 * 2048)
    assert "--mem-fraction-static" not in found.argv
    assert found.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("context", "seqs", "tokens"), [(256, 4, 1024), (4096, 64, 32768), (65536, 4, 65536)])
def test_without_a_gpu_the_cache_is_limited(context, seqs, tokens):
    argv = command(is_cpu=True, context=context, max_num_seqs=seqs).argv
    assert value(argv, "--max-total-tokens") == str(tokens)


def test_ranks_on_cpus_are_bound_to_cores():
    env = command(SglangConfig(tensor_parallel_size=2), is_cpu=True).env
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_boolean_settings_become_flags():
    assert "--disable-radix-cache" in command(SglangConfig(prefix_caching=False)).argv
    assert "--enable-memory-saver" in command(SglangConfig(colocate=True)).argv
    adapters = command(max_lora_rank=16).argv
    assert value(adapters, "--max-lora-rank") == "16" and "--enable-lora" in adapters
    assert "--lora-backend" not in adapters
    assert value(command(max_lora_rank=16, is_cpu=True).argv, "--lora-backend") == "torch_native"


def test_base_weights_of_adapters_survive_the_sleep_of_colocated_servers():
    flag = "--enable-weights-cpu-backup"
    assert flag in command(SglangConfig(colocate=True), max_lora_rank=16).argv
    assert flag not in command(SglangConfig(colocate=True)).argv + command(max_lora_rank=16).argv


def test_additional_arguments_have_the_names_of_sglang():
    args = {
        "attention-backend": "fa3",
        "--chunked-prefill-size": 4096,
        "schedule_policy": "lpm",
        "enable_metrics": True,
        "disable-cuda-graph": False,
        "cuda-graph-bs": [1, 2],
        "json-model-override-args": {"rope_theta": 1},
        "max-running-requests": 99,
        "sleep-on-idle": None,
    }
    argv = command(SglangConfig(args=args)).argv
    assert value(argv, "--attention-backend") == "fa3"
    assert value(argv, "--chunked-prefill-size") == "4096"
    assert value(argv, "--schedule-policy") == "lpm"
    assert "--enable-metrics" in argv and "--disable-cuda-graph" not in argv
    at = argv.index("--cuda-graph-bs")
    assert argv[at + 1 : at + 3] == ["1", "2"]
    assert value(argv, "--json-model-override-args") == '{"rope_theta": 1}'
    assert value(argv, "--max-running-requests") == "99" and argv.count("--max-running-requests") == 1
    assert "--sleep-on-idle" not in argv


@pytest.mark.parametrize("name", [*OURS, "pp-size"])
def test_reserved_arguments_are_refused(name):
    for spelling in (name, f"--{name}", name.replace("-", "_")):
        with pytest.raises(UserError, match=f"generator.sglang.args has {name}, which cannot be set: .+; remove it"):
            command(SglangConfig(args={spelling: "x"}))


@pytest.mark.parametrize("is_cpu", [True, False])
def test_ranks_use_loopback_unless_a_network_is_configured(is_cpu):
    assert command(is_cpu=is_cpu).env["GLOO_SOCKET_IFNAME"] == "lo"
    assert command(SglangConfig(env={"GLOO_SOCKET_IFNAME": "eth0"}), is_cpu=is_cpu).env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_token_is_only_in_the_environment():
    found = command(SglangConfig(env={"MTRL_SERVER_TOKEN": "another", "NCCL_DEBUG": "INFO"}))
    assert found.env["MTRL_SERVER_TOKEN"] == TOKEN and found.env["NCCL_DEBUG"] == "INFO"
    assert not any(TOKEN in word for word in found.argv)
