"""Settings that follow from the GPUs of this machine: engine, number of servers and their memory, recomputation."""

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.config.derived import server_sequences
from mtrl.config.overrides import CONF, normalise
from mtrl.utils.gpus import visible_gpus

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a machine: its number of GPUs, ranks on it, and whether vLLM is installed."""

    def make(gpus, ranks=1, engine=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr("mtrl.config.derived.installed_engine", lambda cfg: "vllm" if engine else None)

    return make


def generator(*words):
    return merge(normalise(["experiment=sop_hf", *words])).generator


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*_hf.yaml")))
def test_experiments_for_language_models_use_servers_on_gpus(experiment, machine):
    words = [f"experiment={experiment}"]
    machine(gpus=1)
    assert merge(words).generator.backend == "vllm"
    machine(gpus=0)
    assert merge(words).generator.backend == "local"


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [(1, 1, (1, True, 0.4)), (8, 8, (8, True, 0.4)), (8, 6, (2, False, 0.8)), (2, 1, (1, False, 0.8))],
)
def test_servers_share_gpus_if_ranks_train_on_all(gpus, ranks, expected, machine):
    machine(gpus, ranks)
    found = generator()
    assert (found.vllm.replicas, found.vllm.colocate, found.gpu_memory_utilization) == expected
    assert (found.sglang.replicas, found.sglang.colocate) == expected[:2]


def test_settings_of_the_command_replace_those_of_the_machine(machine):
    machine(gpus=8, ranks=4)
    assert generator("generator.vllm.tensor_parallel_size=2").vllm.replicas == 2
    found = generator("generator.backend=sglang", "generator.vllm.replicas=3", "generator.gpu_memory_utilization=0.7")
    assert (found.backend, found.vllm.replicas, found.gpu_memory_utilization) == ("sglang", 3, 0.7)
    assert generator("model.device=cpu").backend == generator("generator=local").backend == "local"


def test_overlap_does_not_share_gpus(machine):
    machine(gpus=1)
    assert not generator("async_config.max_steps_off_policy=1").vllm.colocate


def test_the_embedded_engine_samples_on_a_gpu_without_an_installed_engine(machine):
    machine(gpus=1, engine=False)
    found = generator()
    assert (found.backend, found.vllm.colocate, found.vllm.replicas) == ("local", False, 1)


def test_activations_are_recomputed_on_gpus(machine):
    words = ["model=hf", "model.path=owner/name"]
    machine(gpus=1)
    assert merge(words).trainer.gradient_checkpointing
    machine(gpus=0)
    assert not merge(words).trainer.gradient_checkpointing


def test_settings_of_recomputation_warn_where_nothing_is_recomputed():
    words = ["trainer.recomputed_layers=1", "trainer.activation_offload=true"]
    found = [text for text in check(merge(words)) if text.startswith("trainer.")]
    why = "has no effect with trainer.gradient_checkpointing=false, which recomputes no layer"
    assert found == [f"{word} {why}" for word in words]
    assert not [t for t in check(merge([*words, "trainer.gradient_checkpointing=true"])) if t.startswith("trainer.")]


@pytest.mark.parametrize(("listed", "gpus"), [("", 0), ("4,5", 2), ("GPU-1, GPU-2,GPU-3", 3), ("0,-1,1", 1), ("-1", 0)])
def test_gpus_are_counted_as_cuda_counts_them(listed, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == gpus


def test_devices_of_the_driver_are_counted(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("mtrl.utils.gpus.DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus() == 2


@pytest.mark.parametrize(("conversations", "expected"), [(0, 32), (3, 32), (20, 80), (1000, 512)])
def test_servers_sample_four_turns_for_each_conversation_that_fits(conversations, expected):
    assert server_sequences(conversations * GIB, GIB) == expected
