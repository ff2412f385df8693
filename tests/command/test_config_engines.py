"""Settings of engines: errors name key, value and fix, and settings without effect cause a warning."""

import sys

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import CONF, compose
from mtrl.command.engine_checks import check_sampling
from mtrl.config.derived import engine_python
from mtrl.errors import UserError

HERE = [f"generator.{engine}.python={sys.executable}" for engine in ("vllm", "sglang")]
SERVED = ["generator.vllm.urls=[http://127.0.0.1:8000]"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_both_engines_compose_by_group_and_by_key(engine):
    for word in (f"generator={engine}", f"generator.backend={engine}"):
        cfg = compose(["experiment=text_to_sql", word, f"generator.{engine}.python={sys.executable}"])
        assert cfg.generator.backend == engine
        assert check(cfg) == []


REFUSED = [
    (["generator.vllm.weight_sync=nccl"], "generator.vllm.weight_sync=nccl is not known; choose one of disk"),
    (["generator.vllm.pause_mode=retract"], "generator.vllm.pause_mode=retract is not known; choose one of keep, wait"),
    (["generator.vllm.lora=both"], "generator.vllm.lora=both is not known"),
    (["generator.vllm.replicas=0"], "generator.vllm.replicas=0 must be at least 1"),
    (["generator.vllm.sync_timeout=0"], "generator.vllm.sync_timeout=0.0 must be above 0"),
    (
        ["generator=sglang", "generator.sglang.weight_sync=distributed", "generator.sglang.sync_delta=true"],
        "generator.sglang.sync_delta=true has no counterpart in SGLang, which loads whole tensors only; set it to",
    ),
    (["generator.vllm.python=/nowhere/python"], "generator.vllm.python=/nowhere/python is no interpreter; name bin/"),
    (
        ["generator.vllm.devices=[0,1]", "generator.vllm.tensor_parallel_size=4"],
        "generator.vllm.devices=[0,1] must name 4 different GPUs, for generator.vllm.replicas=1 x",
    ),
    (["generator.vllm.devices=[-1]"], "generator.vllm.devices=[-1] must name 1 different GPUs"),
    (
        ["generator.vllm.lora=adapter", "generator.vllm.colocate=true", "async_config.max_steps_off_policy=1"],
        "generator.vllm.colocate=true lets the servers sleep while the policy learns",
    ),
    (
        ["generator.vllm.colocate=true", "async_config.max_steps_off_policy=1"],
        "generator.vllm.colocate=true lets the servers sleep while the policy learns, and async_config.max_steps_off",
    ),
    (
        ["generator.sampling_params.stop=['</a>','']"],
        "generator.sampling_params.stop has the empty text '', which is in every text, so that a turn would end with",
    ),
    (
        ["generator.eval_sampling_params.temperature=0.001"],
        "generator.eval_sampling_params.temperature=0.001 is too low for vLLM, which samples at 0.01 instead; set it",
    ),
    (["generator.vllm.urls=['http://[']"], "generator.vllm.urls has http://[, which is no address"),
    (["generator.vllm.urls=[localhost:8000]"], "generator.vllm.urls has localhost:8000, which is no address"),
    (["generator.vllm.urls=[http://host:1/v1]"], "generator.vllm.urls has http://host:1/v1, which is no address"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[words[0].replace("/", "_") for words, _ in REFUSED])
def test_settings_that_cannot_work_are_refused(overrides, said):
    with pytest.raises(UserError, match="^" + said.translate({ord(c): f"\\{c}" for c in "[]().+"})):
        check(compose(["generator=vllm", *HERE, *overrides]))


def test_an_unused_engine_setting_is_warned_about():
    told = check(compose(["generator=vllm", *SERVED, "generator.vllm.replicas=2", "generator.local.fused=false"]))
    assert sorted(told) == [
        "generator.local.fused=False has no effect with generator.backend=vllm",
        "generator.vllm.replicas has no effect with generator.vllm.urls, whose servers run already",
    ] or sorted(told) == [
        "generator.local.fused=false has no effect with generator.backend=vllm",
        "generator.vllm.replicas has no effect with generator.vllm.urls, whose servers run already",
    ]
    assert check(compose(["generator.sglang.replicas=2"])) == [
        "generator.sglang.replicas=2 has no effect with generator.backend=local"
    ]
    assert check(compose(["generator=vllm", *HERE[:1], "generator.vllm.lora=adapter"])) == [
        "generator.vllm.lora=adapter has no effect with model.lora_rank=0"
    ]


DISTRIBUTED = "generator.vllm.weight_sync=distributed"
ADAPTERS = ["model.lora_rank=4", "generator.vllm.lora=adapter"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([DISTRIBUTED, "model.dtype=bfloat16"], None),
        ([DISTRIBUTED, "model.dtype=bfloat16", "model.lora_rank=4"], None),
        ([DISTRIBUTED, "trainer.fsdp.param_dtype=bfloat16"], None),
        ([DISTRIBUTED, "model=smollm2_135m"], None),
        (
            [DISTRIBUTED],
            "generator.vllm.sync_delta=true saves nothing with model.dtype=float32, where a step changes nearly all",
        ),
        (
            [DISTRIBUTED, "model=smollm2_135m", "trainer.fsdp.param_dtype=float32"],
            "generator.vllm.sync_delta=true saves nothing with trainer.fsdp.param_dtype=float32, where a step changes",
        ),
        (
            [],
            "generator.vllm.sync_delta=true has no effect with generator.vllm.weight_sync=disk; only weight_sync=dist",
        ),
        (
            ["generator.vllm.weight_sync=tensor"],
            "sync_delta=true has no effect with generator.vllm.weight_sync=tensor;",
        ),
        (
            [DISTRIBUTED, *ADAPTERS],
            "generator.vllm.sync_delta=true has no effect with generator.vllm.lora=adapter, since adapters are sent",
        ),
        (ADAPTERS, "generator.vllm.sync_delta=true has no effect with generator.vllm.lora=adapter, since adapters are"),
    ],
)
def test_changes_of_weights_that_save_nothing_are_told(words, told):
    warnings = check(compose(["generator=vllm", *HERE[:1], "generator.vllm.sync_delta=true", *words]))
    warnings = [warning for warning in warnings if "sync_delta" in warning]
    assert len(warnings) == (told is not None)
    assert told is None or told in warnings[0]


OVERLAP = "async_config.max_steps_off_policy=1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([DISTRIBUTED], []),
        (["generator.vllm.sync_folder=/shared"], []),
        (["generator.vllm.sync_folder=/shared", *ADAPTERS], []),
        (["async_config.in_flight=drain", OVERLAP], []),
        (["generator.vllm.api_key_env=KEY", "generator.vllm.python=null", *SERVED], []),
        ([DISTRIBUTED, "generator.vllm.sync_folder=/shared"], ["sync_folder=/shared"]),
        (
            [DISTRIBUTED, "generator.vllm.pause_mode=abort", "async_config.in_flight=drain", OVERLAP, *ADAPTERS],
            ["weight_sync=distributed", "pause_mode=abort", "in_flight=drain"],
        ),
        (["generator.vllm.api_key_env=KEY"], ["api_key_env=KEY"]),
    ],
)
def test_settings_of_the_transport_without_effect_are_told(words, told):
    warnings = check(compose(["generator=vllm", *HERE[:1], *words]))
    assert [warning.split()[0].rpartition(".")[2] for warning in warnings if "has no effect" in warning] == told


def test_the_interpreter_of_an_engine_is_found_or_its_installer_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("MTRL_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    if not (CONF.parent / ".venv-sglang").exists():
        with pytest.raises(UserError, match=r"make it with python scripts/install_engine.py sglang, or name its"):
            engine_python("sglang", None)
    made = tmp_path / ".venv-sglang" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    assert engine_python("sglang", None) == str(made)
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", sys.executable)
    assert engine_python("sglang", None) == sys.executable
    assert engine_python("sglang", str(made)) == str(made)


@pytest.mark.parametrize(("key", "value", "whole"), [("top_p", "0.9", "1.0"), ("top_k", "5", "-1")])
def test_a_cut_distribution_is_refused_in_training_alone(key, value, whole):
    cut = f"generator.sampling_params.{key}={value}"
    with pytest.raises(UserError, match=f"the gradient would be biased; set it to {whole}, and for evaluations alone"):
        check_sampling(compose([cut]))
    check_sampling(compose([cut, "trainer.max_steps=0"]))
    check_sampling(compose([f"generator.eval_sampling_params.{key}={value}"]))
    check_sampling(compose([]))


@pytest.mark.parametrize(
    "words, gpus, is_warned", [([], 0, True), ([], 1, False), (["generator.local.fused=false"], 1, True)]
)
def test_cuda_graphs_without_a_use_are_told(words, gpus, is_warned, monkeypatch):
    monkeypatch.setattr("mtrl.command.hints.visible_gpus", lambda: gpus)
    told = check(compose(["generator.local.cuda_graphs=false", *words]))
    said = "generator.local.cuda_graphs=false has no effect with generator.local.fused=false, or without a gpu"
    assert [line.lower() for line in told] == [said] * is_warned


@pytest.mark.parametrize("gpus, is_warned", [(0, False), (1, False), (2, True)])
def test_the_embedded_engine_leaves_other_gpus_unused(gpus, is_warned, monkeypatch):
    monkeypatch.setattr("mtrl.command.hints.visible_gpus", lambda: gpus)
    told = check(compose(["model=hf", "model.path=owner/name", "trainer.optimizer.lr=1e-6"]))
    assert any("samples on one of the GPUs" in line for line in told) == is_warned


def test_an_embedded_engine_on_each_gpu_leaves_none_unused(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(name, value)
    told = check(compose(["model=hf", "model.path=owner/name", "trainer.optimizer.lr=1e-6"]))
    assert not any("samples on one of the GPUs" in line for line in told)
