"""Completion of commands, keys and values, in a real bash too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrl.cli.completion import completions, script


@pytest.mark.parametrize(
    "line, offered",
    [
        ("mtrl tr", ["train", "track"]),
        ("mtrl serve ", ["vllm", "sglang", "retriever"]),
        ("mtrl completion z", ["zsh"]),
        ("mtrl train trainer.max_steps", ["trainer.max_steps=", "trainer.max_steps_without_signal="]),
        ("mtrl train seed=1 algorithm.loss_fn=pp", ["ppo"]),
        ("mtrl train trainer.packing=", ["true", "false"]),
        ("mtrl evaluate experiment=text", ["text_to_sql", "text_to_sql_hf"]),
        ("mtrl view out", []),
        ("mtrl nonsense ", []),
        ("mtrl train seed=", []),
    ],
)
def test_what_is_offered(line, offered):
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
    """The function that bash calls, in bash, with the command on the path."""
    program = f'{script(["bash"])}\nCOMP_LINE="{line}" COMP_POINT={len(line)}\n_mtrl\nprintf "%s" "${{COMPREPLY[@]}}"'
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", program], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.stdout == replies, done.stderr
