"""`mtrl preflight`: the table, the JSON, the exit status; and the fast checks at the start of a run."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.datasets import Splits
from mtrl.environments.family import get_family
from mtrl.errors import UserError
from mtrl.preflight import __main__ as program
from mtrl.preflight import checklist, checklist_table
from mtrl.preflight.__main__ import check, main
from mtrl.preflight.checklist import CHEAP, CHECKS, cheap_checks, run
from mtrl.preflight.context import CheckContext, environment_factory
from mtrl.preflight.data import batch
from mtrl.preflight.policy_checks import informative
from mtrl.preflight.responses import FUZZ
from mtrl.preflight.result import CheckResult, Status, failed, passed, skipped, warned, worst
from tests import forked

ROOT = Path(__file__).parent.parent.parent


def generated(train, test):
    """Settings that generate few rows. Each process of `hermetic` generates them again, and gold solves every row once,
    which on the whole data takes longer than all other checks together."""
    return [f"data.synthetic_train_rows={train}", f"data.synthetic_test_rows={test}"]


FEW_ROWS = generated(64, 32)
QUICK = ["preflight.rows=2", "preflight.processes=0"]


def command(folder, *overrides):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    words = [sys.executable, "-m", "mtrl.preflight", *overrides]
    return forked.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def config_of(*overrides):
    return OmegaConf.to_object(compose([*overrides, "preflight.model=false"]))


def context_of(*overrides, **changes):
    config = config_of(*overrides)
    family = get_family(config.environment.name, config.environment.target)
    splits = family.load(config.data, config.seed, **config.environment.config)
    make = environment_factory(config, family, config.generator.max_turns)
    return CheckContext(config, family, splits, make, **{"max_rows": 8, "seconds": 20.0, **changes})


def results_of(monkeypatch, *overrides):
    """The whole checklist with every sixth unexpected response, since several checks repeat them, and then the check
    `robust` with all of them."""
    with monkeypatch.context() as fewer:
        fewer.setattr("mtrl.preflight.context.FUZZ", FUZZ[::6])
        results = list(check(config_of(*overrides)))
    return [*results, *run(context_of(*overrides, max_rows=2), [("robust", CHECKS["robust"])])]


@pytest.mark.parametrize(
    ("experiment", "prompt"),
    [("gsm8k", "short"), ("gsm8k", "full"), ("text_to_sql", "full"), ("gsm8k_single_turn", "full")],
)
def test_the_shipped_tasks_pass_everything(experiment, prompt, monkeypatch):
    single_turn, short = experiment == "gsm8k_single_turn", prompt == "short"
    words = (f"experiment={experiment}", f"environment.prompt={prompt}", "preflight.rows=2", *FEW_ROWS)
    results = results_of(monkeypatch, *words, *(["preflight.processes=0"] if short else []))
    shown = [(r.name, r.evidence) for r in results if r.status in (Status.WARN, Status.FAIL)]
    assert not shown
    skipped_checks = {"tool_spam", "stalling"} if single_turn else {"hermetic", "worked_example"} if short else set()
    assert {r.name for r in results if r.status == Status.PASS} == CHECKS.keys() - skipped_checks


def test_the_guides_reward_fails_at_stalling(tmp_path):
    """Four wrong answers with 0.04 each and then the right one have a reward of 1.16."""
    wanted = ("+experiment=gsm8k", "reward=guide", "generator.max_turns=5", "preflight.model=false", *FEW_ROWS)
    done = command(tmp_path, *wanted, *QUICK, "preflight.json=out/found.json")
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert (found["status"], found["name"]) == ("fail", "gsm8k")
    failures = [line for line in found["checks"] if line["status"] == "fail"]
    assert [line["name"] for line in failures] == ["stalling"]
    assert "the direct answer earns 1.00, the best exploit found 1.16: 4× '####" in failures[0]["evidence"]
    assert failures[0]["fix"]
    assert "do not train yet" in done.stdout and all(len(line) <= 80 for line in done.stdout.splitlines()[:-1])


def test_a_pass_is_0_and_the_results_lie_in_the_folder_of_the_run(tmp_path):
    words = ("experiment=gsm8k", "preflight.model=false", *QUICK, "run_dir=here")
    done = command(tmp_path, *words, *FEW_ROWS)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "here" / "preflight.json").read_text())
    assert [line["name"] for line in found["checks"]][: len(CHECKS)] == list(CHECKS)
    (hermetic,) = [line for line in found["checks"] if line["name"] == "hermetic"]
    assert hermetic["status"] == "skip" and "preflight.processes=0" in hermetic["evidence"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.group_sise=3", "did you mean algorithm.group_size=3?"),
        ("experiment=none_such", "experiment=none_such does not exist"),
        ("environment.config.calculater=true", "did you mean environment.config.calculator?"),
    ],
)
def test_a_wrong_configuration_is_2_and_one_sentence(tmp_path, override, sentence):
    done = command(tmp_path, override)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_checks_without_a_model_import_no_torch():
    program = (
        "import sys; from mtrl.preflight.__main__ import main; "
        "status = main(['preflight.model=false', 'preflight.rows=2', 'preflight.processes=0', "
        "'data.synthetic_train_rows=32', 'data.synthetic_test_rows=32', "
        "'preflight.json=' + sys.argv[1]]); "
        "assert status == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, os.devnull], check=True, timeout=120, capture_output=True, cwd=ROOT)


def test_a_check_that_breaks_has_failed():
    def broken(context):
        raise ZeroDivisionError("no rows\nmore")

    (result,) = run(context_of(*FEW_ROWS), [("mine", broken)])
    assert (result.status, result.name) == (Status.FAIL, "mine")
    assert result.evidence.startswith("the check itself failed: ZeroDivisionError in test_preflight_command.py, line ")
    assert result.evidence.endswith(": no rows")


@pytest.mark.parametrize("experiment", ["gsm8k", "text_to_sql"])
def test_the_cheap_checks_pass_on_shipped_tasks(experiment, monkeypatch):
    for limit in ("CHEAP_SECONDS", "SLICE"):  # the machine may be busy
        monkeypatch.setattr(checklist, limit, 120.0)
    context = context_of(f"experiment={experiment}", *FEW_ROWS)
    results = cheap_checks(context.config, context.family, context.splits, context.make_environment)
    assert [r.name for r in results] == list(CHEAP)
    assert {r.status for r in results} <= {Status.PASS, Status.SKIP}, results
    assert {r.name for r in results if r.status == Status.PASS} >= {"splits", "turns", "batch"}


def test_the_cheap_part_finds_a_reward_that_pays_for_stalling(monkeypatch):
    monkeypatch.setattr(checklist, "CHEAP_SECONDS", 120.0)
    context = context_of("reward=guide", *FEW_ROWS)
    results = cheap_checks(context.config, context.family, context.splits, context.make_environment)
    assert "stalling" in [r.name for r in results if r.status == Status.FAIL]


def test_without_training_rows_no_size_of_a_step_is_advised():
    context = context_of(*FEW_ROWS)
    context.splits = Splits([], context.splits.test)
    assert batch(context).status == Status.SKIP


@pytest.mark.parametrize(
    ("evaluated", "test", "validation", "keys"),
    [
        (16, 200, 0, "evaluation.rows"),
        (200, 16, 0, "data.max_test_rows, data.synthetic_test_rows"),
        (16, 200, 16, "evaluation.rows, data.validation_rows"),
        (200, 200, 16, "data.validation_rows"),
    ],
)
def test_few_evaluated_rows_name_the_keys_that_limit_them(evaluated, test, validation, keys):
    context = context_of(*FEW_ROWS)
    row = context.splits.test[0]
    context.config.evaluation.rows = evaluated
    context.splits = Splits(context.splits.train, [row] * test, [row] * validation)
    result = batch(context)
    assert result.status == Status.WARN and "16 evaluated" in result.evidence
    assert result.fix == f"evaluate 100 rows or more: {keys}"


@pytest.mark.parametrize(
    ("name", "why"),
    [("", " is a folder; name a file in it"), ("file/new.json", "cannot be made (File exists); name another file")],
)
def test_results_that_cannot_be_written_are_refused_before_the_checks(tmp_path, monkeypatch, name, why):
    (tmp_path / "file").touch()
    monkeypatch.setattr(program, "check", None)
    with pytest.raises(UserError, match=f"^preflight.json={tmp_path}.*{re.escape(why)}$"):
        main([f"preflight.json={tmp_path / name}"])


def test_an_environment_that_changes_the_working_directory_does_not_move_the_results(tmp_path, monkeypatch):
    def moving(config):
        os.chdir(tmp_path / "elsewhere")
        yield passed("moved").named("gold", 0.0)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "check", moving)
    assert main(["run_dir=run"]) == 0
    assert (tmp_path / "run" / "preflight.json").is_file() and list((tmp_path / "elsewhere").iterdir()) == []


def test_the_cheap_part_raises_nothing_and_waits_for_nothing():
    context = context_of("environment.step_timeout=30", *FEW_ROWS)

    def hang():
        time.sleep(3600)

    def burst():
        raise RuntimeError("no environment today")

    for make in (hang, burst):
        results = cheap_checks(context.config, context.family, Splits(context.splits.train[:9], []), make)
        assert [r.name for r in results] == list(CHEAP)
        assert not any(r.status == Status.PASS for r in results if r.name in ("gold", "agreement", "stalling"))


def test_informative_groups_by_hand():
    assert informative(0.5, 2) == 0.5
    assert informative(0.0, 8) == informative(1.0, 8) == 0.0
    assert informative(0.25, 4) == pytest.approx(1 - 0.75**4 - 0.25**4)


def test_the_worst_line_decides():
    assert worst([passed("x"), skipped("y")]) == Status.PASS
    assert worst([passed("x"), warned("y", "z")]) == Status.WARN
    assert worst([failed("x", "y"), warned("y", "z")]) == Status.FAIL


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_width_and_shows_everything(width):
    results = [
        CheckResult(Status.FAIL, "word " * 60, "mend " * 30, name="policy_agreement", seconds=12.3),
        CheckResult(Status.PASS, "short", name="gold", seconds=0.1),
        CheckResult(Status.WARN, "hostile \x1b[2J text\nin two lines", "look", name="x"),
    ]
    page = io.StringIO()
    checklist_table.console(page, width).print(checklist_table.table(results))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "\x1b" not in page.getvalue()
    assert page.getvalue().count("word") == 60 and page.getvalue().count("mend") == 30
    assert len({line.index(word) for line in lines for word in ("short", "hostile") if word in line}) == 1


@pytest.mark.slow
def test_the_policy_plays_last(tmp_path):
    """A policy with a warm start of two updates never succeeds, and a success rate of zero fails a check."""
    wanted = ["experiment=gsm8k", "debug=fast", "preflight.rollouts=8", *QUICK]
    status = main([*wanted, f"preflight.json={tmp_path / 'found.json'}"])
    found = {line["name"]: line for line in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert status == 1 and found["foothold"]["status"] == "fail"
    assert found["foothold"]["evidence"].startswith("0 of 8 sampled episodes succeed")
    assert found["token_cap"]["status"] in ("pass", "warn") and "16 tokens" in found["token_cap"]["evidence"]
    assert found["policy_optimum"]["evidence"].endswith("the policy solves 0 of 8: 0.00")
    assert found["groups"]["status"] == "warn" and found["failures"]["status"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "rows"),
    [("games", 4), ("mini_swe", 2), ("search", 4), ("sop", 4), ("triviaqa", 4), ("service", 4), ("visual_maze", 4)],
)
@pytest.mark.ci
def test_the_other_shipped_tasks_fail_nowhere(experiment, rows, monkeypatch):
    """Their READMEs explain their warnings. mini_swe has fewer episodes, since its turns start sandboxes."""
    words = (f"experiment={experiment}", f"preflight.rows={rows}", "preflight.seconds=5")
    results = results_of(monkeypatch, *words, *generated(4 * rows, 2 * rows))
    assert not [(r.name, r.evidence) for r in results if r.status == Status.FAIL]
    assert {r.name for r in results if r.status == Status.PASS} >= {"hermetic", "leaks", "concurrency", "gold"}
