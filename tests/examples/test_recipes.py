"""The programs of the recipes run as documented."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(words, folder, **variables):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(words, folder, **variables):
    process = start(words, folder, **variables)
    shown, _ = process.communicate(timeout=300)
    return process.returncode, shown


def train(words, folder):
    """Run `python` with these words in a forked process."""
    environment = os.environ | {"PYTHONPATH": f"{EXAMPLES.parent}"}
    command = [sys.executable, *words]
    done = forked.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@contextmanager
def ending(process):
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.slow
def test_rows_are_written_and_trained_on(tmp_path):
    recipe = EXAMPLES / "turn_level_rewards"
    status, shown = run(["bash", recipe / "run_gsm8k_multi_turn.sh"], tmp_path)
    assert status == 2 and "gsm8k_multi_turn_dataset.py --output_dir data/gsm8k_multi_turn" in shown

    status, shown = run(
        [sys.executable, recipe / "gsm8k_multi_turn_dataset.py"], tmp_path, PYTHONPATH=f"{EXAMPLES.parent}"
    )
    assert status == 0, shown
    rows = [json.loads(line) for line in (tmp_path / "data/gsm8k_multi_turn/train.jsonl").open()]
    assert len(rows) == 4096 and {"prompt", "ground_truth"} <= rows[0].keys()

    program = tmp_path / "bin" / "python"  # a stand-in that prints its arguments
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    words = [recipe / "run_gsm8k_multi_turn.sh", "debug=fast", "trainer.max_steps=1", "run_dir=run"]
    status, shown = run(["bash", *words], tmp_path, PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert status == 0, shown
    train(shown.splitlines(), tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    assert "path: data/gsm8k_multi_turn" in (tmp_path / "run" / "config.yaml").read_text()


def test_the_recipe_accepts_a_model_and_an_engine(tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    script = EXAMPLES / "turn_level_rewards" / "run_gsm8k_multi_turn.sh"
    status, shown = run(
        ["bash", script, "--cfg", "job"], tmp_path, MODEL="you/model", ENGINE="sglang", DATA=f"{tmp_path}"
    )
    assert status == 0, shown
    assert "path: you/model" in shown and "backend: sglang" in shown and "lr: 1.0e-06" in shown


def test_the_retriever_answers_the_questions(tmp_path):
    script = EXAMPLES / "search" / "start_retriever.sh"
    with ending(start(["bash", script], tmp_path, PORT="0")) as server:
        ready = server.stdout.readline()
        assert ready.startswith("ready http://127.0.0.1:") and "10 passages" in ready
        address = ready.split()[1]
        corpus = {json.loads(line)["title"]: line for line in (EXAMPLES / "search" / "corpus.jsonl").open()}
        for line in (EXAMPLES / "search" / "questions.jsonl").open():
            row = json.loads(line)
            assert any(answer in text for answer in row["golden_answers"] for text in corpus.values())
            found = httpx.post(f"{address}/retrieve", json={"queries": [row["question"]], "topk": 3}).json()
            assert len(found["result"][0]) == 3


@pytest.mark.slow
def test_the_custom_agent_is_trained(tmp_path):
    words = [
        "-m", "mtrl.main", "experiment=gsm8k", "debug=fast", "run_dir=run",
        "generator.agent.target=examples.custom_agent.my_agent.run",
    ]  # fmt: skip
    train(words, tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
