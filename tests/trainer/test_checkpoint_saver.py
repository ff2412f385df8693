"""Checkpoints that are written during training hold the state of their step."""

import os
import random
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from shard_ranks import FORK, on_ranks

from mtrl.errors import UserError
from mtrl.trainer.checkpoint import tensors as checkpoint_tensors
from mtrl.trainer.checkpoint.checkpoint import Checkpoints, read_checkpoint
from mtrl.trainer.checkpoint.saver import BackgroundSaver, Saver
from mtrl.trainer.checkpoint.tensors import load_tensors


def tensors(value=0.0, size=50):
    return {"model.w": torch.full((size,), value), "optimizer.w.exp_avg": torch.full((size,), value)}


def read(path):
    """Return the values of the tensors."""
    into = tensors()
    load_tensors(into, path)
    return {float(value) for tensor in into.values() for value in tensor}


def save(saver, checkpoints, step, state):
    """Save as the leader does."""
    saver.wait()
    partial = checkpoints.begin(step)
    saver.save(state, partial)
    saver.finish(lambda: checkpoints.commit(partial, {"step": step}))


@pytest.fixture
def slow(monkeypatch):
    """A disk that sets `begun` and waits for `go` before it writes."""

    class Disk:
        begun, go = threading.Event(), threading.Event()

    real = checkpoint_tensors.write_tensors

    def write(path, tensors):
        Disk.begun.set()
        assert Disk.go.wait(30)
        real(path, tensors)

    monkeypatch.setattr(checkpoint_tensors, "write_tensors", write)
    yield Disk
    Disk.go.set()


def fail(monkeypatch):
    """Make every later write fail as on a full disk."""

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_tensors, "write_tensors", full)


@pytest.mark.parametrize("kind", [Saver, BackgroundSaver])
def test_both_savers_write_the_same_files(tmp_path, kind):
    saver, checkpoints = kind(), Checkpoints(tmp_path)
    for step in (1, 2):
        save(saver, checkpoints, step, tensors(step))
    saver.wait()
    assert [read(path) for path in checkpoints.all()] == [{1.0}, {2.0}]
    saver.wait()


def test_the_saved_state_does_not_change_with_later_training(tmp_path, slow):
    saver, checkpoints, state = BackgroundSaver(), Checkpoints(tmp_path), tensors(1.0)
    save(saver, checkpoints, 1, state)
    assert slow.begun.wait(30)
    for tensor in state.values():
        tensor.fill_(2.0)  # training changes the weights in place
    assert checkpoints.latest() is None, "nothing has its name before it is whole"
    slow.go.set()
    saver.wait()
    assert read(checkpoints.latest()) == {1.0}


def test_a_save_waits_for_the_previous_one(tmp_path, slow):
    saver, checkpoints = BackgroundSaver(), Checkpoints(tmp_path)
    save(saver, checkpoints, 1, tensors(1.0))
    second = threading.Thread(target=save, args=(saver, checkpoints, 2, tensors(2.0)))
    second.start()
    assert slow.begun.wait(30)
    assert second.is_alive() and len(list(tmp_path.iterdir())) == 1
    slow.go.set()
    second.join(30)
    saver.wait()
    assert [read(path) for path in checkpoints.all()] == [{1.0}, {2.0}]


@pytest.mark.parametrize("how", ["wait", "save"])
def test_the_next_call_raises_the_error_of_a_full_disk(tmp_path, monkeypatch, how):
    saver, checkpoints = BackgroundSaver(), Checkpoints(tmp_path)
    save(saver, checkpoints, 1, tensors(1.0))
    saver.wait()
    with monkeypatch.context() as patch:
        fail(patch)
        save(saver, checkpoints, 2, tensors(2.0))
        message = (
            r"step_000002 could not be written \(No space left on device\); the last complete one is .*step_000001;"
        )
        with pytest.raises(UserError, match=message):
            saver.wait() if how == "wait" else saver.save(tensors(3.0), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    save(saver, checkpoints, 3, tensors(3.0))
    saver.wait()
    assert read(checkpoints.latest()) == {3.0}, "message once; then it goes on"


def test_errors_of_the_last_save_are_raised(tmp_path, monkeypatch):
    saver, checkpoints = BackgroundSaver(), Checkpoints(tmp_path)
    partial = checkpoints.begin(1)
    saver.save(tensors(), partial)
    saver.finish(lambda: checkpoints.commit(partial, {"step": 1, "odd": object()}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert checkpoints.latest() is None


def _save_on_ranks(folder):
    """Save on two ranks, with a slow disk on rank 1. Return the files that existed when the leader committed."""
    group, rank = dist.new_group(backend="gloo"), dist.get_rank()
    saver, found = BackgroundSaver(group), []
    partial = folder / "partial"
    if rank == 0:
        partial.mkdir()
    dist.barrier()
    real = checkpoint_tensors.write_tensors

    def slow(path, tensors):
        time.sleep(0.3 * rank)
        real(path, tensors)

    checkpoint_tensors.write_tensors = slow
    saver.save({f"model.{n}": torch.full((4,), float(n)) for n in range(4)}, partial)
    if rank == 0:
        saver.finish(lambda: found.extend(sorted(path.name for path in partial.iterdir())))
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group can be used meanwhile
    saver.wait()
    return found, total.item()


def test_the_leader_commits_after_every_rank_has_written(tmp_path):
    (found, total), (nothing, _) = on_ranks(2, tmp_path, _save_on_ranks, tmp_path)
    assert found == ["SHA256SUMS", "model-rank0.safetensors", "model-rank1.safetensors", "tensors.json"] and not nothing
    assert total == 2.0


def _save_for_ever(folder):
    os.fsync = lambda handle: None  # a killed process loses no data in the cache of the system, and this is faster
    saver, checkpoints, step = BackgroundSaver(), Checkpoints(folder, keep_last=2), 0
    if (last := checkpoints.latest()) is not None:
        step = read_checkpoint(last).state["step"] - 1  # a resumed run finds checkpoints of the same steps
    state = tensors(float(step))
    while True:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        save(saver, checkpoints, step, state)


def _whole(folder):
    """Return the steps of the checkpoints; assert that each holds one value everywhere, that of its step."""
    steps = []
    for path in Checkpoints(folder).all():
        steps.append(read_checkpoint(path).state["step"])
        assert read(path) == {steps[-1]} and path.name == f"step_{steps[-1]:06d}"
    return steps


def test_a_kill_at_any_moment_leaves_only_complete_checkpoints(tmp_path):
    chance, last = random.Random(7), 0
    for _ in range(20):
        process = FORK.Process(target=_save_for_ever, args=(tmp_path,), daemon=True)
        process.start()
        while (path := Checkpoints(tmp_path).latest()) is None or path.name <= f"step_{last:06d}":
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        last = _whole(tmp_path)[-1]
    assert last >= 20
    assert Checkpoints(tmp_path).begin(99_999).is_dir()
    assert len(list(tmp_path.glob(".partial*"))) == 1, "what was left half-written is gone"


def _save_twice(folder, copies):
    """Replace step 2, then write step 3, which removes it. Copy the folder before each change to it."""
    os.fsync = lambda handle: None  # as above
    changes = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
    done, copying = 0, False

    def before(event, arguments):
        nonlocal done, copying
        if copying or event not in changes:
            return
        if str(folder) in str(arguments[0]) or event in ("os.remove", "os.rmdir"):
            copying = True
            shutil.copytree(folder, copies / f"{done:03}")
            done, copying = done + 1, False

    def state_last(path):  # the files of a deleted folder are removed in any order; this call is not counted
        with scandir(path) as entries:
            return nullcontext(sorted(entries, key=lambda entry: entry.name == "state.json"))

    scandir, os.scandir = os.scandir, state_last
    sys.addaudithook(before)
    checkpoints = Checkpoints(folder, keep_last=1)
    for step in (2, 3):
        save(Saver(), checkpoints, step, tensors(step))
    os._exit(0)


def test_a_kill_before_any_change_to_the_disk_leaves_a_complete_checkpoint(tmp_path):
    """A kill loses nothing that was written, so that the folder after a kill is the folder at that moment."""
    folder, copies = tmp_path / "folder", tmp_path / "copies"
    for step in (1, 2):
        save(Saver(), Checkpoints(folder), step, tensors(step))
    process = FORK.Process(target=_save_twice, args=(folder, copies))  # whose audit hook stays
    process.start()
    process.join(120)
    assert process.exitcode == 0
    left = [_whole(copy) for copy in (*sorted(copies.iterdir()), folder)]
    assert all(left) and left[0] == [1, 2] and left[-1] == [3]
    assert len(left) > 30
