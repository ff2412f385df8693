"""`mtrl.train`, `mtrl.evaluate` and `mtrl.load`, called as in a notebook."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import mtrl
from mtrl import api
from mtrl.errors import UserError
from tests import forked

pytestmark = pytest.mark.xdist_group("notebook")  # one worker trains
SMALL = {"trainer": {"max_steps": 1, "save_trajectories_every": 1}, "preflight": {"at_start": "none"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose process is forked; `test_a_run_is_evaluated` starts a real one."""
    lines = []
    folder = tmp_path_factory.mktemp("notebook") / "run"
    with pytest.MonkeyPatch.context() as patch:
        pipes = {"PIPE": subprocess.PIPE, "STDOUT": subprocess.STDOUT}
        patch.setattr(api, "subprocess", SimpleNamespace(Popen=forked.Popen, **pipes))
        found = mtrl.train("gsm8k", "debug=fast", seed=3, run_dir=folder, show=lines.append, **SMALL)
    assert found.path == folder and any("evaluation at step 1" in line for line in lines)
    return found


@pytest.mark.slow
def test_a_run_is_trained_and_read(run):
    assert run.settings["seed"] == 3 and run.settings["trainer.max_steps"] == 1
    assert run.summary["steps"] == 1 and run.summary["seed"] == 3
    assert [row["step"] for row in run.rows] == [0, 1]
    assert list(run.series("val/success/mean")) == [0, 1] and run.series("no/such") == {}
    assert {turn.finish.value for t in run.trajectories("eval_greedy") for turn in t.turns} <= {"stop", "length"}
    assert len(list(run.trajectories())) == 4
    assert mtrl.load(str(run.path)).summary == run.summary


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_evaluated(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    report = mtrl.evaluate(run, "evaluation.rows=4", show=lambda line: None, evaluation={"sampled_rows": 0})
    assert report["format"] == "mtrl.evaluation"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no run, for it has no config.yaml; give the folder of a run"):
        mtrl.load(tmp_path)


def test_a_model_without_a_task_needs_an_experiment():
    """The message names the argument that `mtrl.evaluate` takes; `recipe` is that of the classes of SageMaker's API."""
    with pytest.raises(
        UserError, match="^model=gpt2 does not belong to a run, .*; give experiment=NAME as well, one of"
    ):
        mtrl.evaluate("gpt2")


def test_an_empty_dict_reaches_the_command(tmp_path, monkeypatch):
    """It creates a section that is null by default; where it changes nothing, the command says so."""
    commands = []
    monkeypatch.setattr("mtrl.notebook.load", lambda path: None)
    monkeypatch.setattr(api.MultiTurnRLTrainer, "train", lambda self, show: commands.append(self.command))
    mtrl.train(run_dir=tmp_path / "run", generator={"eval_sampling_params": {}}, reward={"components": {}})
    assert {"generator.eval_sampling_params={}", "reward.components={}"} <= set(commands[0])


def test_the_folder_of_results_is_an_argument(monkeypatch, tmp_path):
    """The results were searched in the folder of the argument, after the whole run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "run_command", lambda words, show: pytest.fail("the command began"))
    with pytest.raises(UserError, match="^run_dir=mine .*; give run_dir=FOLDER as an argument$"):
        mtrl.train("gsm8k", "run_dir=mine")
    with pytest.raises(UserError, match="^evaluation.output=mine .*; give evaluation={'output': FOLDER}"):
        mtrl.evaluate("a/b", "evaluation.output=mine", experiment="gsm8k")
    with pytest.raises(UserError, match=r"^\+\+run_dir=mine .*; give run_dir=FOLDER as an argument$"):
        mtrl.train("gsm8k", "++run_dir=mine")


@pytest.mark.parametrize("word", ["-m", "--multirun", "--cfg=job"])
def test_an_option_that_leaves_no_result_of_one_run_is_refused(word, monkeypatch):
    """The command did all its work, and then the summary of the run was not found."""
    monkeypatch.setattr(api, "run_command", lambda words, show: pytest.fail("the command began"))
    with pytest.raises(UserError, match=f"^{word} is an option of the command, .*: mtrl train -m$"):
        mtrl.train("gsm8k", word)


def test_an_unknown_attribute_is_refused():
    with pytest.raises(AttributeError, match="'mtrl' has no attribute 'trian'"):
        mtrl.trian  # noqa: B018
    assert {"train", "evaluate", "load"} <= set(dir(mtrl))


def test_the_functions_import_no_torch():
    code = "import sys, mtrl; mtrl.train, mtrl.evaluate, mtrl.load; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
