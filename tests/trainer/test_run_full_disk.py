"""A run folder that cannot be written: a full disk, and a read-only one."""

import errno
import re
import subprocess
import sys

import pytest

from mtrl.command.compose import compose
from mtrl.distributed.world import World
from mtrl.errors import UserError
from mtrl.trainer import run as running
from tests.trainer.runs import ROOT, SMALL


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_unwritable_folder_is_an_error_with_the_resume_command(tmp_path, monkeypatch, number):
    def full(*_):
        raise OSError(number, "no space")

    monkeypatch.setattr(World, "join", full)
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=f"no space left for {folder}; free some, .* run_dir={folder} resume=latest"):
        running.train(compose(["experiment=gsm8k", f"run_dir={folder}"]))
    assert "OSError" in (folder / "run.log").read_text(), "where it was"


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(World, "join", broken)
    with pytest.raises(OSError, match="broken"):
        running.train(compose(["experiment=gsm8k", f"run_dir={tmp_path / 'run'}"]))


SOON = ["evaluation.before_train=false", "trainer.checkpoint.every_steps=1"]


def in_a_mount(folder, mount, *words):
    """Start a run in `folder`, over which bubblewrap mounts another file system. Return its status and last line."""
    command = ["bwrap", "--dev-bind", "/", "/", *mount, str(folder), "--chdir", str(ROOT), sys.executable, "-m"]
    done = subprocess.run(
        [*command, "mtrl.main", *SMALL, *SOON, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stdout and "Logging error" not in done.stdout, done.stdout
    return done.returncode, done.stdout.splitlines()[-1]


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
    status, output = in_a_mount(tmp_path, ["--size", str(size), "--tmpfs"], f"run_dir={run}")
    assert status == 2 and re.fullmatch(sentence.format(run=run), output), output


@pytest.mark.slow
def test_a_read_only_folder(tmp_path):
    words = [f"run_dir={tmp_path}", "resume=latest"]
    for name in ("checkpoints", "trajectories"):
        (tmp_path / name).mkdir()
    assert in_a_mount(tmp_path, ["--ro-bind", str(tmp_path)], *words) == (
        2,
        f"run_dir={tmp_path} cannot be written (Read-only file system: run.log); make it writable, or copy it "
        "and continue with the copy",
    )
