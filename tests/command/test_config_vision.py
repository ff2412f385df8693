"""Settings of models that read images: what mtrl does not support is refused in one sentence before anything runs."""

import json

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.command.vision_checks import VISION_TYPES
from mtrl.errors import UserError
from mtrl.models.vision import FAMILIES

MAZE = "experiment=visual_maze"
REFUSED = {
    "model=tiny": "visual_maze shows images, and model.name=tiny reads text only; set model=tiny_vision",
    "environments={a:{environment:{name:visual_maze}}} model=tiny": "environment.name=visual_maze shows images",
    "generator.backend=vllm generator.vllm.urls=[http://127.0.0.1:8000]": "generator.backend=vllm; set generator=local",
    "generator.use_conversation_multi_turn=false": "set generator.use_conversation_multi_turn=true",
    "generator.context.fold=keep_last": "set generator.context.fold=none",
    "async_config.max_steps_off_policy=1": "set async_config.max_steps_off_policy=0",
    "generator.local.process=true": "set generator.local.process=false generator.local.replicas=1",
    "rollouts.workers=2": "set rollouts.workers=0",
    "trainer.packing=true": "set trainer.packing=false",
    "trainer.compile=true": "set trainer.compile=false",
    "trainer.fsdp.param_dtype=bfloat16": "set trainer.fsdp.param_dtype=null trainer.fsdp.cpu_offload=false",
    "model.lora_rank=4": "set model.lora_rank=0",
    "algorithm.router_replay=true": "set algorithm.router_replay=false",
    "algorithm=gae": "the critic of algorithm.advantage_method=gae; set algorithm=turn_rloo",
    "trainer.packing=true model.lora_rank=4": "and model.lora_rank=4; set trainer.packing=false, model.lora_rank=0",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_does_not_read_images_is_refused(overrides):
    with pytest.raises(UserError) as refused:
        check(compose([MAZE, *overrides.split()]))
    assert REFUSED[overrides] in str(refused.value)
    if "shows images" not in REFUSED[overrides]:
        assert str(refused.value).startswith("model.tiny.vision_layers=1 reads images, which mtrl does not support")


@pytest.mark.parametrize(("name", "sees"), [("qwen3_vl", True), ("qwen2_5_vl", True), ("qwen3", False)])
def test_the_configuration_of_a_folder_tells_whether_the_model_reads_images(name, sees, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    words = ["model=hf", f"model.path={tmp_path}"]
    if sees:
        check(compose([MAZE, *words]))
        with pytest.raises(UserError, match=f"model.path={tmp_path} reads images, .* with trainer.packing=true"):
            check(compose([MAZE, *words, "trainer.packing=true"]))
    else:
        with pytest.raises(UserError, match=f"model.path={tmp_path} reads text only"):
            check(compose([MAZE, *words]))


def test_a_model_behind_an_api_may_play_a_task_with_images():
    check(compose([MAZE, "model=tiny", "evaluation.model=name@http://127.0.0.1:8000/v1"]))


def test_a_model_that_is_not_here_is_checked_when_it_is_loaded():
    check(compose([MAZE, "model=hf", "model.path=owner/name"]))


def test_a_setting_without_effect_warns():
    warnings = check(compose(["experiment=gsm8k", "model.freeze_vision=false"]))
    assert "model.freeze_vision=false has no effect: the model has no vision tower" in warnings
    assert not any("freeze_vision" in warning for warning in check(compose([MAZE])))


def test_text_tasks_run_on_a_model_that_reads_images():
    check(compose(["experiment=gsm8k", "model=tiny_vision"]))


def test_checks_and_models_agree_on_the_families():
    assert VISION_TYPES == FAMILIES
