"""Programs beside `mtrl.main` whose output does not fit the disk, or is on a read-only one, end in one sentence."""

import errno
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from mtrl.command.program import one_sentence
from tests.trainer.runs import ROOT

PROGRAMS = {
    "demonstrate": ["mtrl.demonstrate", "experiment=gsm8k", "--count", "200", "--out", "{}/made.jsonl"],
    "preflight": ["mtrl.preflight", "experiment=gsm8k", "preflight.model=false", "preflight.json={}/found.json"],
    "evaluate": ["mtrl.evaluate", "debug=fast", "evaluation.output={}/report"],
}  # fmt: skip
"""Commands with a place for the folder that they write to."""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_the_sentence_names_the_file(capsys, number):
    with pytest.raises(SystemExit) as ended, one_sentence():
        raise OSError(number, "?", "report/metrics.jsonl")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("report/metrics.jsonl cannot be written (") and said.endswith("name another folder\n")


def test_safetensors_has_an_error_of_its_own(capsys):
    with pytest.raises(SystemExit), one_sentence():
        raise SafetensorError(f"Error while serializing: I/O error: No space left on device (os error {errno.ENOSPC})")
    assert capsys.readouterr().err.startswith("the output cannot be written (No space left on device)")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), SafetensorError("no header"), KeyError("x")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)), one_sentence():
        raise error


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_disk_that_is_full(tmp_path, program):
    """A disk of one page, which bubblewrap mounts over the folder."""
    mount = ["bwrap", "--dev-bind", "/", "/", "--size", "4096", "--tmpfs", str(tmp_path), "--chdir", str(ROOT)]
    words = [word.format(tmp_path) for word in PROGRAMS[program]]
    done = subprocess.run(
        [*mount, sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    said = done.stdout.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert said == "the output cannot be written (No space left on device); free some space or name another folder"
