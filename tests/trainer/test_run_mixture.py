"""A run on a mixture as a program: metrics of each source, exact resume, and the programs that open the run."""

import json
import os
import subprocess
import sys

import pytest
from runs import QUIET, ROOT, finish, rows_of, weights_of

from mtrl.config.mixture import RESERVED
from tests import forked

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]

NAMES = {"words", "sql"}
TINY = ("experiment=mixture", "debug=fast", "trainer.prompts_per_step=3", "environments.words.weight=2", *QUIET)


def program(module, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, words)]
    return finish(forked.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))


def test_a_mixture_has_metrics_of_each_source_resumes_exactly_and_can_be_opened(tmp_path):
    whole, again = tmp_path / "whole", tmp_path / "again"
    output = program("mtrl.main", *TINY, f"run_dir={whole}")
    assert "67% words: gsm8k" in output
    first, *_, last = rows_of(whole)
    assert (last["rollout/words/groups"], last["rollout/sql/groups"]) == (2.0, 1.0)
    assert {key for key in first if key.startswith("val/words/")} and first["val/sql/episodes"] == 2.0
    words = {key.split("/")[1] for key in {**first, **last} if key.startswith(("rollout/", "val/", "data/"))}
    assert words - NAMES <= {*RESERVED}

    resume = f"resume={whole / 'checkpoints' / 'step_000001'}"
    program("mtrl.main", *TINY, resume, f"run_dir={again}")
    assert weights_of(again) == weights_of(whole) and rows_of(again)[-1] == last

    program("mtrl.rescore", whole, f"out={tmp_path / 'rescored.json'}")
    program("mtrl.evaluate", whole, "evaluation.source=sql", f"evaluation.output={tmp_path / 'evaluation'}")
    (row,) = rows_of(tmp_path / "evaluation")
    assert row["val/success/mean"] == row["val/sql/success/mean"] and "val/words/success/mean" not in row
    assert json.loads((tmp_path / "rescored.json").read_text())
