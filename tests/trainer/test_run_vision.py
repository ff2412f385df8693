"""Whole runs of a model that reads images: they resume exactly, and other programs read what they leave."""

import pytest
import torch
from runs import NO_EVALUATION, finish, rows_of, start, weights_of
from safetensors.torch import load_file

from mtrl.types import read_trajectories
from mtrl.utils.images import pixels_of

pytestmark = pytest.mark.slow

MAZE = [
    "experiment=visual_maze",
    *NO_EVALUATION,
    "reward=default",
    "generator.max_turns=4",
    "generator.sampling_params.max_generate_length=4",
    "trainer.prompts_per_step=2",
    "trainer.max_steps=2",
    "trainer.checkpoint.every_steps=1",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "whole"
    finish(start(folder, *MAZE))
    return folder


def test_a_resumed_run_is_exact(whole, tmp_path):
    half = tmp_path / "half"
    finish(start(half, *MAZE, f"resume={whole}/checkpoints/step_000001"))
    assert rows_of(half) == rows_of(whole)[-1:] and weights_of(half) == weights_of(whole)


def test_engine_and_trainer_agree(whole):
    row = next(
        row for row in rows_of(whole) if row.get("step") == 2
    )  # the first step may have no success to learn from
    assert row["train/grad_norm"] > 0 and row["analysis/logprob_drift/max"] < 1e-4


def test_the_export_is_a_model_of_transformers_whose_tower_was_trained(whole):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(whole / "export")
    assert AutoImageProcessor.from_pretrained(whole / "export").merge_size == 2
    assert len(AutoTokenizer.from_pretrained(whole / "export")) == model.config.text_config.vocab_size
    before = load_file(whole / "checkpoints" / "step_000001" / "model.safetensors")
    name = next(name for name in model.state_dict() if "visual" in name and "merger" in name)
    assert not torch.equal(model.state_dict()[name], before[name])


def test_saved_trajectories_show_their_images(whole):
    files = sorted((whole / "trajectories").glob("*.jsonl"))
    trajectories = [trajectory for file in files for trajectory in read_trajectories(file)]
    shown = [trajectory.images_of(turn) for trajectory in trajectories for turn in range(len(trajectory.turns))]
    assert trajectories and all(pixels_of(image).shape == (16, 16, 3) for images in shown for image in images)
    assert {len(images) for images in shown} == {1}


def test_a_model_of_a_folder_is_trained_with_a_frozen_tower(whole, tmp_path):
    words = ["model=hf", f"model.path={whole}/export", "environment.prompt=short", "generator.max_context_length=800"]
    finish(start(tmp_path / "run", *MAZE, *words, "trainer.prompts_per_step=6"))
    before, after = (load_file(folder / "export" / "model.safetensors") for folder in (whole, tmp_path / "run"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("visual" in name for name in moved)
