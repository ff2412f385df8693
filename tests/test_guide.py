"""The guide to custom environments, followed step by step with its commands.

`tests/test_docs.py` runs its training command, and shows that the environment of the quickstart is learned.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "custom_environments.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
STRICT = """response == f"it is {ground_truth['answer']}\""""
LENIENT = """ground_truth["answer"] in response"""
QUICK = ("preflight.rows=8", "preflight.model=false")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("guide")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a reader, with the file of the guide."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "library.py").write_text(
        re.search(r"```python\n(# library\.py\n.*?)```", GUIDE, re.DOTALL)[1], encoding="utf-8"
    )
    return folder


def follow(module, folder, *more, **keywords):
    """Run the first command of the guide that uses `module`, like a reader."""
    words = next(words for words in COMMANDS if words[:2] == ["mtrl", module])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MTRL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"mtrl.{module}", *words[2:], *more]
    return forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, **keywords)


def test_the_environment_of_the_guide_can_be_run_by_hand(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    from library import Library

    row = Library.load(None, seed=0).train[0]
    done = follow("play", folder, "row=0", input="\n".join([*Library.gold(row), "/quit", ""]))
    assert done.returncode == 0, done.stderr
    assert f"where is {row['ground_truth']['title']}" in done.stdout
    assert re.search(r"score\s+1", done.stdout), done.stdout


@pytest.mark.ci
def test_the_pre_flight_finds_no_problem(folder):
    """The checks use an eighth of the rows, and no policy."""
    done = follow("preflight", folder, *QUICK)
    assert done.returncode == 0, done.stdout
    assert "ready to train" in done.stdout and "\nwarn" not in done.stdout


@pytest.mark.ci
def test_the_pre_flight_finds_the_lenient_answer_and_the_few_turns(folder, tmp_path):
    code = (folder / "library.py").read_text()
    assert STRICT in code
    (tmp_path / "library.py").write_text(code.replace(STRICT, LENIENT))
    done = follow("preflight", tmp_path, *QUICK, "preflight.processes=0", "generator.max_turns=4")
    assert done.returncode == 1
    assert re.findall(r"^fail  (\w+)", done.stdout, re.MULTILINE) == [
        "agreement", "format_only", "stuffing", "local_optimum"
    ]  # fmt: skip
    assert re.findall(r"^warn  (\w+)", done.stdout, re.MULTILINE) == ["turns"]
