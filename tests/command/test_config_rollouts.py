"""Settings of rollout workers: errors name key, value and fix, and settings without effect cause a warning."""

import importlib.util

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.config.derived import in_a_process, local_replicas
from mtrl.errors import UserError

SERVED = ["generator.backend=vllm", "generator.vllm.urls=[http://127.0.0.1:8000]"]
REFUSED = [
    (["rollouts.workers=-1"], "rollouts.workers=-1 must be at least 0"),
    (["rollouts.workers=2", "rollouts.timeout=0"], "rollouts.timeout=0.0 must be above 0"),
    (["rollouts.workers=2", "model.device=cuda"], "rollouts.gpus=0 gives it none; write rollouts.gpus=1"),
    (["environment.resources={cpu: -1}"], "environment.resources.cpu=-1.0 must be at least 0"),
    (["environment.resources.memory=2"], "environment.resources.memory=2 is not a size; write a number above 0 and a"),
    (["environment.resources={custom: {license: many}}"], "custom.license=many must be a number of at least 0.0001"),
    (["environment.resources={custom: {GPU: 1}}"], "custom.GPU=1 is a resource that Ray has by itself; its key is"),
    (["environment.resources={gpu: 1}"], "environment.resources.gpu"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_work_is_refused(overrides, said):
    with pytest.raises(UserError) as refused:
        check(compose(overrides))
    assert said in str(refused.value)


def test_without_ray_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    assert check(compose([])) == []
    with pytest.raises(UserError, match=r"rollouts.workers=2 needs, is not installed; .*mtrl-agents\[ray\]"):
        check(compose(["rollouts.workers=2"]))


@pytest.mark.parametrize(
    "more", [[], *(["model.lora_rank=8", f"generator.vllm.lora={way}"] for way in ("merged", "adapter"))]
)
def test_servers_sample_for_workers(more):
    assert check(compose(["rollouts.workers=2", *SERVED, "rollouts.gpus=0", *more])) == []


def test_what_has_no_effect_is_told():
    assert check(compose(["rollouts.gpus=1"])) == ["rollouts.gpus has no effect with rollouts.workers=0"]
    asked = "environment.resources={cpu: 1, memory: 2GiB, custom: {license: 1}}"
    assert check(compose([asked])) == ["environment.resources has no effect with rollouts.workers=0"]
    assert check(compose([asked, "rollouts.workers=2"])) == []
    (said,) = check(compose(["rollouts.workers=2", "generator.local.process=true"]))
    assert said.startswith("generator.local.process=true has no effect with rollouts.workers")
    (said,) = check(compose(["rollouts.workers=2", "generator.local.replicas=2"]))
    assert said.startswith("generator.local.replicas=2 has no effect with rollouts.workers")


def test_replicas_of_the_embedded_engine_are_checked(monkeypatch):
    assert check(compose(["generator.local.replicas=2"])) == []
    with pytest.raises(UserError, match="replicas=2 runs in processes, and generator.local.process=false allows none"):
        check(compose(["generator.local.replicas=2", "generator.local.process=false"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="replicas=3 needs a GPU for each replica, and this machine shows 2; write"):
        check(compose(["generator.local.replicas=3"]))
    assert check(compose(["generator.local.replicas=3", "model.device=cpu"])) == []


@pytest.mark.parametrize(
    "words, ranks, gpus, expected",
    [
        ([], 1, "0,1", (1, False)),
        ([], 2, "0,1", (2, True)),
        ([], 2, "", (1, False)),
        (["model.device=cpu"], 2, "0,1", (1, False)),
        (["generator.local.process=false"], 2, "0,1", (1, False)),
        (["generator.local.replicas=1"], 2, "0,1", (1, False)),
        (["generator.local.replicas=2"], 1, "", (2, True)),
        (["async_config.max_steps_off_policy=1"], 1, "", (1, True)),
    ],
)
def test_every_gpu_on_which_a_rank_trains_samples(words, ranks, gpus, expected, monkeypatch):
    cfg = compose(words)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert (local_replicas(cfg), in_a_process(cfg)) == expected
