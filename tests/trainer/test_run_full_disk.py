"""A run folder that cannot be written: a full disk, and a read-only one."""

import errno
import re

import pytest
from safetensors import SafetensorError

from mtrl.command.compose import compose
from mtrl.distributed.world import World
from mtrl.errors import UserError
from mtrl.trainer import run as running
from tests.trainer.runs import finish, start


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space"),
        OSError(errno.EDQUOT, "over the quota"),
        SafetensorError(f"Error while serializing: I/O error: no space (os error {errno.ENOSPC})"),
    ],
)
def test_an_unwritable_folder_is_an_error_with_the_resume_command(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(World, "join", full)
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=f"no space left for {folder}; free some, .* run_dir={folder} resume=latest"):
        running.train(compose(["experiment=gsm8k", f"run_dir={folder}"]))
    assert type(error).__name__ in (folder / "run.log").read_text(), "where it was"


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(World, "join", broken)
    with pytest.raises(OSError, match="broken"):
        running.train(compose(["experiment=gsm8k", f"run_dir={tmp_path / 'run'}"]))


SOON = ["evaluation.before_train=false", "trainer.checkpoint.every_steps=1"]


MOUNTED = """
import ctypes, os
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER = 2**17, 2**28
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 2**12, 2**14, 2**18

def call(name, *words):
    if getattr(libc, name)(*words):
        raise OSError(ctypes.get_errno(), name)

ids = {{"uid_map": os.getuid(), "gid_map": os.getgid()}}
if libc.unshare(CLONE_NEWNS):  # without the right to mount, as root of a new user namespace, with the same ids
    call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in ids.items():
        Path("/proc/self", name).write_text(f"{{number}} {{number}} 1")
call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
folder = {folder!r}.encode()
{mount}
"""
"""A program that mounts another file system over `folder`, which no other process sees."""


def in_a_mount(folder, mount, run, *words):
    """Start a run after `mount` over its folder or the folder above. Return its last line."""
    process = start(run, *SOON, *words, code=MOUNTED.format(folder=str(folder), mount=mount))
    output = finish(process, expected=2)
    assert "Traceback" not in output and "Logging error" not in output, output
    return output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (4096, "there is no space left for {run}; free some, then go on with: .* resume=latest"),
        (
            400_000,
            "checkpoint {run}/checkpoints/step_000001 could not be written .*; free some space or name another .*",
        ),
    ],
)
def test_a_full_disk(tmp_path, size, sentence):
    """The disk has one page, or too few pages for the first checkpoint."""
    run = tmp_path / "run"
    mount = f'call("mount", b"tmpfs", folder, b"tmpfs", 0, b"size={size}")'
    output = in_a_mount(tmp_path, mount, run)
    assert re.fullmatch(sentence.format(run=run), output), output


@pytest.mark.slow
def test_a_read_only_folder(tmp_path):
    for name in ("checkpoints", "trajectories"):
        (tmp_path / name).mkdir()
    mount = 'call("mount", folder, folder, None, MS_BIND, None)\n'
    mount += 'call("mount", None, folder, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None)'
    assert in_a_mount(tmp_path, mount, tmp_path, "resume=latest") == (
        f"run_dir={tmp_path} cannot be written (Read-only file system: run.log); make it writable, or copy it "
        "and continue with the copy"
    )
