"""Checkpoints are complete or absent."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from shard_ranks import FORK

from mtrl.errors import UserError
from mtrl.trainer.checkpoint.checkpoint import Checkpoints, find_checkpoint, read_checkpoint
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import read_tensors


def save(checkpoints, step, score=None, groups=(), size=64):
    partial = checkpoints.begin(step)
    Saver().save({"model.w": torch.full((size,), float(step))}, partial)
    return checkpoints.commit(partial, {"step": step, "score": score}, groups, {"torch": torch.get_rng_state()})


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    path = save(Checkpoints(tmp_path), 7, 0.5)
    assert path.name == "step_000007"
    back = read_checkpoint(path)
    assert back.path == path and back.state == {"step": 7, "score": 0.5} and back.groups == []
    assert torch.equal(back.rng["torch"], torch.get_rng_state())
    assert torch.equal(read_tensors(path, "model")["w"], torch.full((64,), 7.0))
    assert not (path / "groups.jsonl").exists()


def test_groups_of_an_asynchronous_run_are_stored(tmp_path):
    groups = [{"group_id": "step1/0~", "row": {"id": "α\u2028β"}}, {"group_id": "step1/1", "logprob": -0.1 - 0.2}]
    path = save(Checkpoints(tmp_path), 1, groups=groups)
    assert read_checkpoint(path).groups == groups
    assert len((path / "groups.jsonl").read_bytes().split(b"\n")) == 3, "one a line"


def test_the_last_n_and_the_best_checkpoint_are_retained(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=True)
    for step, score in ((1, 0.1), (2, 0.9), (3, None), (4, 0.3), (5, 0.9), (6, 0.2), (7, None)):
        save(checkpoints, step, score)
    assert [p.name for p in checkpoints.all()] == ["step_000005", "step_000006", "step_000007"]
    assert checkpoints.best().name == "step_000005" and checkpoints.latest().name == "step_000007"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 0.1)
    (checkpoints.latest() / "of before").touch()
    assert read_checkpoint(save(checkpoints, 1, 0.2)).state["score"] == 0.2
    assert not (checkpoints.latest() / "of before").exists() and len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_is_replaced_before_the_old_one_is_deleted(tmp_path, monkeypatch):
    """The deletion of a large checkpoint takes seconds, in which the run may be killed."""
    checkpoints, found = Checkpoints(tmp_path, keep_last=1), []
    save(checkpoints, 1, 0.1)
    delete = shutil.rmtree

    def rmtree(path, **options):
        if Path(path).exists():
            found.append(read_checkpoint(checkpoints.latest()).state["score"])
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(checkpoints, 1, 0.2)
    assert found == [0.2]


def test_an_incomplete_checkpoint_is_never_read(tmp_path):
    save(Checkpoints(tmp_path), 1)
    checkpoints = Checkpoints(tmp_path)
    killed = Checkpoints(tmp_path).begin(2)
    (killed / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step_000009").mkdir()
    assert checkpoints.latest().name == "step_000001"
    mine = checkpoints.begin(3)
    assert mine.is_dir() and not killed.exists(), "what killed runs left goes, what is being written stays"
    assert checkpoints.begin(4).is_dir() and mine.is_dir()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text("{"),
        lambda path: (path / "rng.safetensors").unlink(),
        lambda path: (path / "rng.safetensors").write_bytes((path / "rng.safetensors").read_bytes()[:40]),
        lambda path: (path / "groups.jsonl").write_text('{"group_id":'),
    ],
)
def test_an_unreadable_checkpoint_is_an_error_in_one_sentence(tmp_path, damage):
    path = save(Checkpoints(tmp_path), 1)
    damage(path)
    with pytest.raises(UserError, match="checkpoint .*step_000001 cannot be read .*no other one in .* is intact"):
        read_checkpoint(path)


def test_resume_finds_a_checkpoint_or_the_latest_of_a_run(tmp_path):
    saved = [save(Checkpoints(tmp_path / "checkpoints"), step) for step in (1, 2)]
    assert find_checkpoint(saved[0]) == saved[0]
    assert find_checkpoint(tmp_path) == saved[1]
    with pytest.raises(UserError, match="neither a checkpoint nor a run that has one"):
        find_checkpoint(tmp_path / "nowhere")


def _save_on_a_full_disk(folder, limit, queue):
    # A limit on file sizes fails writes in the middle, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        save(Checkpoints(folder), 2, size=10_000 if limit > 1000 else 1)
    except UserError as error:
        queue.put(str(error))


@pytest.mark.parametrize("limit", [4096, 500])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, limit):
    """The disk is full while tensors are written, or after them; the random state is larger than 500 bytes."""
    previous = save(Checkpoints(tmp_path), 1)
    queue = FORK.Queue()
    process = FORK.Process(target=_save_on_a_full_disk, args=(tmp_path, limit, queue))
    process.start()
    message = queue.get(timeout=60)
    process.join()
    assert "step_000002 could not be written" in message and "File too large" in message
    assert f"the last complete one is {previous}" in message and "resume=latest" in message
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert json.loads((previous / "state.json").read_text())["step"] == 1 and read_checkpoint(previous)


def test_a_folder_that_cannot_be_created_is_an_error_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="step_000003 could not be written .* or name another run_dir"):
        Checkpoints(tmp_path / "file" / "checkpoints").begin(3)
