"""Completion of commands, keys and values, also in a real bash."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtrl.cli.completion import completions, script


@pytest.mark.parametrize(
    "line, offered",
    [
        ("mtrl tr", ["train", "track"]),
        ("mtrl serve ", ["vllm", "sglang", "retriever", "environment"]),
        ("mtrl completion z", ["zsh"]),
        ("mtrl train trainer.max_steps", ["trainer.max_steps=", "trainer.max_steps_without_signal="]),
        ("mtrl train seed=1 algorithm.loss_fn=pp", ["ppo"]),
        ("mtrl train trainer.packing=", ["true", "false"]),
        ("mtrl evaluate experiment=text", ["text_to_sql", "text_to_sql_hf", "text_to_sql_smollm2"]),
        ("mtrl view out", []),
        ("mtrl nonsense ", []),
        ("mtrl train seed=", []),
    ],
)
def test_completions(line, offered):
    assert completions(line) == offered


def test_keys_are_offered_section_by_section():
    offered = completions("mtrl train ")
    assert {"experiment=", "seed=", "trainer.", "algorithm."} <= set(offered)
    assert not any(word.count(".") > 1 for word in offered)
    assert "trainer.optimizer." in completions("mtrl train trainer.o")


@pytest.mark.parametrize(
    "line, replies",
    [("mtrl dia", "diagnose "), ("mtrl train algorithm.loss_fn=gs", "gspo "), ("mtrl train see", "seed=")],
)
def test_bash_completes(line, replies):
    """Call the completion function in bash, with the command on the path."""
    program = f'{script(["bash"])}\nCOMP_LINE="{line}" COMP_POINT={len(line)}\n_mtrl\nprintf "%s" "${{COMPREPLY[@]}}"'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", program], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.stdout == replies, done.stderr


ZSHRC = "PS1='ready '\nautoload -Uz compinit && compinit -u -d {dump}\n{script}\n"


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("mtrl dia", "mtrl diagnose "), ("mtrl train algorithm.loss_fn=gs", "loss_fn=gspo "), ("mtrl train see", "seed=")],
)
def test_zsh_completes(typed, completed, tmp_path):
    """Press Tab in an interactive zsh, and read the proposed words."""
    (tmp_path / ".zshrc").write_text(ZSHRC.format(dump=tmp_path / "dump", script=script(["zsh"])))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb", "PATH": path})
    try:
        read_until(terminal, "ready ")
        os.write(terminal, f"{typed}\t".encode())
        assert completed in read_until(terminal, completed)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal, words, seconds=60):
    """Return the output of a terminal up to these words, or up to a time limit."""
    shown, end = "", time.monotonic() + seconds
    while words not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
