"""The command `mtrl`: every subcommand starts its program, help fits a screen, and a wrong word is one sentence."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

import mtrl
from mtrl.cli.command import find, help_text, main
from mtrl.cli.commands import COMMANDS
from mtrl.utils.quiet_pipe import STATUS

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("mtrl")


def run(*words, **options):
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120, **options)


def test_every_command_has_a_program():
    named = [command.module for command in COMMANDS.values()]
    for module in chain.from_iterable([module] if isinstance(module, str) else module.values() for module in named):
        spec = find_spec(module)
        assert spec is not None, module
        if spec.submodule_search_locations is not None:
            assert find_spec(f"{module}.__main__") is not None, module


def test_every_program_has_a_command():
    packages = {path.parent.name for path in (ROOT / "mtrl").glob("*/__main__.py")}
    files = {path.stem for path in (ROOT / "mtrl").glob("*.py") if '"__main__":' in path.read_text(encoding="utf-8")}
    modules = [command.module for command in COMMANDS.values()]
    named = {module.removeprefix("mtrl.") for module in modules if isinstance(module, str)} | {"retrieval"}
    assert {*packages, *files} - {"__main__"} == named


def test_help_fits_a_screen():
    lines = help_text().splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 80
    assert all(any(f"  {name} " in line for line in lines) for name in COMMANDS)
    assert run().stdout.strip() == run("--help").stdout.strip() == help_text()


def test_a_command_is_its_program():
    ours, theirs = (
        run("diagnose", "--help"),
        subprocess.run([sys.executable, "-m", "mtrl.diagnose", "--help"], capture_output=True, text=True, timeout=120),
    )
    assert ours.returncode == theirs.returncode == 0 and ours.stdout == theirs.stdout


def test_train_composes_as_mtrl_main_does(tmp_path):
    done = run("train", "--cfg", "job", "experiment=games", "seed=7", cwd=tmp_path)
    assert done.returncode == 0 and "seed: 7" in done.stdout and "name: games" in done.stdout


def test_the_status_of_a_program_is_the_status_of_its_command(tmp_path):
    done = run("train", "seeed=1", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean seed=1?" in done.stderr


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["trian"], "mtrl trian is no command; did you mean mtrl train?"),
        (["xyz"], "mtrl xyz is no command; mtrl --help lists them"),
        (["seed=1", "a=2"], "mtrl seed=1 names no command; to train with it write mtrl train seed=1 a=2"),
        (["serve"], "mtrl serve names no server; write mtrl serve with one of vllm, sglang, retriever, environment"),
        (
            ["serve", "tgi"],
            "mtrl serve tgi names no server; write mtrl serve with one of vllm, sglang, retriever, environment",
        ),
        (["completion", "csh"], "mtrl completion csh names no known shell; write one of bash, zsh"),
    ],
)
def test_a_wrong_command_ends_in_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.strip() == sentence


@pytest.mark.parametrize("words", [[], ["train"], ["diagnose"], ["sft"], ["serve", "retriever"]], ids=" ".join)
def test_a_program_whose_reader_has_ended_ends_quietly(words):
    """The case is `mtrl train --help | head -1`. All other programs start by `run_program`, like `diagnose`."""
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [PROGRAM, *words, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, env=buffered
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (STATUS, "")


def test_serve_names_the_module_of_a_server():
    assert find(["serve", "vllm", "--model", "x"]) == ("mtrl.engines.vllm.serve", ["--model", "x"])
    assert "--corpus" in run("serve", "retriever", "--help").stdout


def test_the_help_of_serve_names_the_servers(capsys):
    """`mtrl --help` says that every command has `--help`."""
    main(["serve", "--help"])
    assert "  mtrl serve environment --help" in capsys.readouterr().out.splitlines()


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"mtrl {mtrl.__version__}\n"
