"""The checks at the start of a run: logged, saved, limited in time, and without effect on the run."""

import json
import os
import random
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

import mtrl
from mtrl.command.compose import compose
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.preflight import at_start, checklist
from mtrl.preflight.at_start import check_at_start, restored_random_state, results_in_time
from mtrl.preflight.checklist import CHEAP
from mtrl.preflight.result import Status
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent


@cache
def composed(*overrides):
    return compose(overrides)


def config_of(*overrides):
    return OmegaConf.to_object(composed("data.synthetic_train_rows=32", "data.synthetic_test_rows=32", *overrides))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Function `start("key=value", …)` that returns the logged lines and the saved results, without time limits."""
    monkeypatch.setattr(at_start, "LIMIT", 60.0)
    monkeypatch.setattr(checklist, "CHEAP_SECONDS", 60.0)
    monkeypatch.setattr(checklist, "SLICE", 10.0)

    def run(*overrides):
        config, notes, warnings = config_of(*overrides), [], []
        check_at_start(config, load_task(config), tmp_path, notes.append, warnings.append)
        path = tmp_path / "preflight.json"
        return SimpleNamespace(
            notes=notes, warnings=warnings, found=json.loads(path.read_text()) if path.exists() else None
        )

    return run


def test_results_of_a_sound_task_are_one_line_and_saved(start):
    done = start()
    assert done.warnings == []
    assert [line["name"] for line in done.found["checks"]] == list(CHEAP)
    (note,) = done.notes
    assert note.startswith("preflight: ") and " pass" in note


def test_failures_are_logged_with_evidence_and_fix_and_the_run_continues(start):
    done = start("reward=guide")
    (line,) = [line for line in done.warnings if "stalling" in line]
    kept = {check["name"]: check for check in done.found["checks"]}["stalling"]
    assert kept["status"] == "fail"
    assert line == f"preflight: stalling failed: {kept['evidence']}; {kept['fix']}" and "\n" not in line


RAISES = """
from types import SimpleNamespace
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Splits

class Raises(BaseEnvironment):
    def step(self, response, ground_truth):
        return ground_truth["misspelt"]

    @staticmethod
    def load(data, seed, **config):
        prompt = [{"role": "user", "content": "say it"}]
        rows = [{"id": f"{n}", "prompt": prompt, "ground_truth": {"answer": f"{n}"}} for n in range(40)]
        return Splits(train=rows[:20], test=rows[20:])

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: "1")
"""


def test_an_environment_that_always_raises_is_reported_with_its_line(start, tmp_path, monkeypatch):
    (tmp_path / "always_raises.py").write_text(RAISES)
    monkeypatch.syspath_prepend(tmp_path)
    done = start("environment.target=always_raises.Raises", "name=raises")
    (said,) = [warning for warning in done.warnings if "range failed" in warning]
    assert "no episode ended without an error" in said and "KeyError in always_raises.py, line 8: 'misspelt'" in said


def test_stop_stops_in_one_sentence(start):
    with pytest.raises(
        UserError, match="preflight.at_start=stop: stalling failed: .*preflight.at_start=warn continues"
    ):
        start("reward=guide", "preflight.at_start=stop")


def test_none_leaves_them_out(start):
    done = start("reward=guide", "preflight.at_start=none")
    assert done.notes == done.warnings == [] and done.found is None


def test_other_words_are_refused():
    with pytest.raises(UserError, match="preflight.at_start=halt is not known; choose one of warn, stop, none"):
        compose(["preflight.at_start=halt"])


def test_results_of_a_whole_checklist_are_not_overwritten(start, tmp_path):
    path = tmp_path / "preflight.json"
    whole = {"checks": [{"name": str(n)} for n in range(len(CHEAP) + 1)]}
    for text, kept in ((json.dumps(whole), True), ('{"checks": []}', False), ("half of", False), ("[]", False)):
        path.write_text(text)
        if kept:
            assert start().found == whole
        else:
            assert [line["name"] for line in start().found["checks"]] == list(CHEAP)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(at_start, "LIMIT", 60.0)  # the machine may be busy
    config = config_of(f"preflight.json={tmp_path}/file/x.json")
    (tmp_path / "file").touch()
    warnings = []
    check_at_start(config, load_task(config), tmp_path, print, warnings.append)
    assert len(warnings) == 1 and "cannot be written" in warnings[0]


def hang(*arguments):
    time.sleep(60)


def burst(*arguments):
    raise SystemExit("no\nlonger")


@pytest.mark.parametrize("part", ["gold", "demonstrate", "score"])
@pytest.mark.parametrize("broken", [hang, burst])
def test_nothing_that_a_task_does_ends_or_holds_up_a_run(part, broken, monkeypatch):
    monkeypatch.setattr(at_start, "LIMIT", 0.7)
    config = config_of()
    task = load_task(config)
    task = replace(task, family=replace(task.family, **{part: broken}))
    results = results_in_time(config, task)
    assert results and not all(result.status == Status.PASS for result in results)
    assert broken is burst or "did not end within 0.7 s" in results[0].evidence


def test_checks_that_break_as_a_whole_are_a_warning(monkeypatch):
    monkeypatch.setattr(at_start, "cheap_checks", burst)
    (result,) = results_in_time(config_of(), load_task(config_of()))
    assert result.status == Status.WARN and result.evidence == "the checks themselves failed: SystemExit: no"


def test_the_random_state_is_as_before():
    import torch

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    seed()
    wanted = draw()
    seed()
    with restored_random_state():
        drawn = [draw() for _ in range(5)]
    assert drawn[0] == wanted and draw() == wanted

    config = config_of()
    task = load_task(config)

    def careless(make):
        draw()
        return make()

    task = replace(task, make_environment=partial(careless, task.make_environment))
    seed()
    results_in_time(config, task)
    assert draw() == wanted


RUN = [
    "debug=fast",
    "trainer.max_steps=1",
    "tracker.plots=false",
    "evaluation.before_train=false",
    "diagnosis.live=none",
]


@pytest.mark.slow
def test_a_run_checks_before_the_warm_start_and_not_again_when_resumed(tmp_path):
    """The first check fails: its rows are in both splits."""

    def program(*words):
        target = "environment.target=tests.preflight.broken.overlapping_splits.FAMILY"
        command = [sys.executable, "-m", "mtrl.main", *RUN, target, "run_dir=run", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    stopped = program("preflight.at_start=stop", "run_dir=other")
    assert stopped.returncode == 2 and "\npreflight.at_start=stop: splits failed" in f"\n{stopped.stderr}"
    assert not (tmp_path / "other" / "metrics.jsonl").exists()

    first = program()
    assert first.returncode == 0, first.stderr
    assert "warning: preflight: splits failed" in first.stdout
    assert first.stdout.index("preflight:") < first.stdout.index("held out")
    (tmp_path / "run" / "preflight.json").unlink()
    again = program("resume=latest", "trainer.max_steps=2")
    assert again.returncode == 0 and "preflight:" not in again.stdout
    assert not (tmp_path / "run" / "preflight.json").exists()
