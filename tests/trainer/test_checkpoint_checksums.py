"""A changed bit in a checkpoint is detected, and the run continues from an intact checkpoint."""

import random
import subprocess

import pytest
import torch

from mtrl.command.compose import compose
from mtrl.errors import UserError
from mtrl.record.checksums import SUMS, damage
from mtrl.record.run_dir import RunDir
from mtrl.trainer.checkpoint.checkpoint import Checkpoints, read_checkpoint
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import read_tensors
from mtrl.trainer.run import intact_checkpoint

FILES = ("groups.jsonl", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "tensors.json")


def save(checkpoints, step, score=None):
    partial = checkpoints.begin(step)
    tensors = {name: torch.full((64,), float(step)) for name in ("model.w", "optimizer.m")}
    Saver().save(tensors, partial)
    rng = {"torch": torch.get_rng_state()}
    return checkpoints.commit(partial, {"step": step, "score": score}, [{"group_id": "step1/0"}], rng)


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_every_file_has_a_checksum_in_the_format_of_sha256sum(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    assert {file.name for file in path.iterdir()} == {*FILES, SUMS} and damage(path) is None
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_reported_with_the_name_of_its_file(tmp_path, name):
    """The test flips four bits of each of the six files."""
    path = save(Checkpoints(tmp_path), 1)
    for bit in random.Random(name).sample(range(8 * (path / name).stat().st_size), 4):
        flip(path / name, bit)
        with pytest.raises(UserError, match=rf"cannot be read \({name} is not as it was written, by its checksum in"):
            read_checkpoint(path)
        flip(path / name, bit)
    assert read_checkpoint(path).state["step"] == 1


def test_a_flipped_bit_of_the_checksums_is_reported(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    for bit in random.Random(0).sample(range(8 * (path / SUMS).stat().st_size), 50):
        flip(path / SUMS, bit)
        assert damage(path) is not None
        flip(path / SUMS, bit)


def test_checksums_are_compared_for_weights_that_other_programs_read(tmp_path):
    path = save(Checkpoints(tmp_path), 1)
    flip(path / "model.safetensors", 8 * 120 + 3)
    with pytest.raises(UserError, match="model.safetensors is not as it was written"):
        read_tensors(path, "model")
    assert torch.equal(read_tensors(path, "optimizer")["m"], torch.ones(64)), "which is intact"


def test_the_error_names_the_newest_intact_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    intact, _, newest = (save(checkpoints, step) for step in (1, 2, 3))
    for step in (2, 3):
        flip(tmp_path / f"step_{step:06d}" / "state.json", 9)
    with pytest.raises(UserError, match=f"give another one: resume={intact}$"):
        read_checkpoint(newest)


def test_resume_latest_reads_the_newest_intact_checkpoint(tmp_path):
    """A damaged checkpoint is renamed, so that it does not count as one of the checkpoints to keep."""
    run = RunDir(tmp_path).create()
    checkpoints, warnings = Checkpoints(run.checkpoints, keep_last=3), []
    for step in (1, 2, 3):
        save(checkpoints, step)
    flip(run.checkpoints / "step_000003" / "model.safetensors", 8 * 120)
    flip(run.checkpoints / "step_000002" / "groups.jsonl", 5)
    config = compose(["resume=latest", f"run_dir={tmp_path}"])
    found = intact_checkpoint(checkpoints.latest(), config, run, warnings.append)
    assert found.path.name == "step_000001" and len(warnings) == 2
    assert "step_000003 is skipped (model.safetensors is not as it was written" in warnings[0]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "damaged-step_000002", "damaged-step_000003", "step_000001",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_checkpoint_with_a_missing_file_is_skipped_with_a_warning(tmp_path, name):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    intact, newest = save(checkpoints, 1), save(checkpoints, 2)
    (newest / name).unlink()
    checkpoint, broken = checkpoints.read_newest()
    assert checkpoint.path == intact and list(broken) == [newest] and name in broken[newest]


def test_no_intact_checkpoint_is_an_error_in_one_sentence(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    flip(save(checkpoints, 1) / "state.json", 3)
    (save(checkpoints, 2) / "rng.safetensors").unlink()
    warnings = "step_000002: rng.safetensors is missing; step_000001: state.json is not as it was written"
    with pytest.raises(UserError, match=warnings):
        checkpoints.read_newest()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"score": "high"}', b"\xff", None])
def test_a_damaged_old_checkpoint_does_not_end_a_healthy_run(tmp_path, content):
    """The score of the damaged checkpoint cannot be read, so the checkpoint is not the best."""
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=True)
    old = save(checkpoints, 1, 0.9) / "state.json"
    old.unlink() if content is None else old.write_bytes(content)
    for step in (2, 3, 4):
        save(checkpoints, step, step / 10)
    assert [path.name for path in checkpoints.all()] == ["step_000003", "step_000004"]
    assert checkpoints.best().name == "step_000004"
