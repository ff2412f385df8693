"""Programs other than `mtrl.main` end with one sentence if their disk is full or read-only."""

import errno
import json
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from mtrl.command.program import one_sentence
from tests.trainer.runs import ROOT

PROGRAMS = {
    "demonstrate": ["mtrl.demonstrate", "debug=fast", "--count", "64", "--out", "{}/made.jsonl"],
    "preflight": [
        "mtrl.preflight", "debug=fast", "preflight.model=false", "preflight.rows=4", "preflight.processes=0",
        "preflight.json={}/found.json",
    ],
    "evaluate": ["mtrl.evaluate", "debug=fast", "model.warm_start.enabled=false", "evaluation.output={}/report"],
}  # fmt: skip
"""Commands with a placeholder for their output folder."""


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


def test_torch_hides_the_error_behind_its_own(capsys):
    with pytest.raises(SystemExit), one_sentence(), open("/dev/full", "wb") as file:
        torch.save({"a": torch.zeros(100_000)}, file)
    assert capsys.readouterr().err.startswith("the output cannot be written (No space left on device)")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), SafetensorError("no header"), KeyError("x")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)), one_sentence():
        raise error


ONE_AFTER_ANOTHER = """
import json, os, sys, tempfile
import mtrl.evaluation.evaluation, mtrl.models.tiny, mtrl.trainer.setup.parts  # takes seconds, so only once
from tests.forked import _become

commands, results = json.loads(sys.stdin.read()), {}
for name, words in commands.items():
    with tempfile.TemporaryFile() as output:
        if not (pid := os.fork()):
            streams = [os.dup(0), os.dup(output.fileno()), os.dup(output.fileno())]
            _become(["-m", *words], ".", dict(os.environ), streams, False)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        results[name] = status, output.read().decode()
print(json.dumps(results))
"""
"""Runs the programs in children of this process, all of which see the same mounts."""


@pytest.mark.slow
@pytest.mark.ci
def test_a_disk_that_is_full(tmp_path):
    """A disk of one page for each program, which bubblewrap mounts over its folder."""
    commands = {name: [word.format(tmp_path / name) for word in words] for name, words in PROGRAMS.items()}
    mounts = [word for name in PROGRAMS for word in ("--size", "4096", "--tmpfs", str(tmp_path / name))]
    results = subprocess.run(
        ["bwrap", "--dev-bind", "/", "/", *mounts, "--chdir", str(ROOT), sys.executable, "-c", ONE_AFTER_ANOTHER],
        input=json.dumps(commands),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=300,
    )
    for name, (code, output) in json.loads(results.stdout).items():
        assert code == 2 and "Traceback" not in output, (name, output)
        expected = "the output cannot be written (No space left on device); free some space or name another folder"
        assert output.splitlines()[-1] == expected, name
