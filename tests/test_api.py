"""The Python API: trainers and evaluators build commands, run them, and accept arguments of SageMaker AI."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from mtrl import api
from mtrl.api import MultiTurnRLEvaluator, MultiTurnRLTrainer, override
from mtrl.command.compose import compose
from mtrl.errors import UserError
from tests import forked


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    with_pipes = SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(api, "subprocess", with_pipes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "it's; $(rm) {a: b}, \\'c\\' [x]"),
        ("name", "5"),
        ("name", "null"),
        ("model.path", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("trainer.max_steps", 3),
        ("trainer.optimizer.lr", 1e-6),
        ("tracker.report_to", ["tensorboard", "mlflow"]),
        ("plugins", ["json", "os.path"]),
        ("trainer.optimizer.betas", [0.9, 0.95]),
        ("tracker.plots", False),
        ("data.max_test_rows", None),
        ("reward.components", {"length_penalty": {"weight": 0.2, "max_tokens": 64, "buffer_tokens": 16}}),
    ],
    ids=str,
)
def test_override_preserves_value_and_type(key, value):
    read = OmegaConf.select(compose([override(key, value), "run_dir=somewhere"]), key)
    read = OmegaConf.to_container(read) if OmegaConf.is_config(read) else read
    if isinstance(value, dict):  # the section may contain other components
        read = {name: {k: read[name][k] for k in value[name]} for name in value}
    assert read == value and type(read) is type(value)


def test_arguments_are_keys(tmp_path):
    trainer = MultiTurnRLTrainer(
        "text_to_sql", model="a/b", agent_env="my.Env", agent="http://127.0.0.1:9", training_dataset="rows",
        overrides={"seed": 1}, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert trainer.command[1:] == [
        "-m", "mtrl.main", "model=hf", "experiment=text_to_sql", "model.path=a/b", "environment.target=my.Env",
        "generator.agent.url='http://127.0.0.1:9'", "data.path=rows", "seed=1", override("run_dir", tmp_path / "run"),
    ]  # fmt: skip
    assert "generator.agent.target=a.function" in MultiTurnRLTrainer(agent="a.function", run_dir="r").command
    assert "evaluation.model=a/b" in MultiTurnRLEvaluator("a/b", recipe="gsm8k", output="o").command


def test_an_override_of_none_is_null_and_an_argument_of_none_is_left_out(tmp_path):
    overrides = {"data.max_test_rows": None, "evaluation.claim_threshold": None}
    for model, base in (
        (MultiTurnRLTrainer("gsm8k", overrides=overrides, run_dir="r"), ["experiment=gsm8k"]),
        (MultiTurnRLEvaluator("a/b", recipe="gsm8k", overrides=overrides, output="o"), []),
    ):
        words = model.command[3:]
        assert {"data.max_test_rows=null", "evaluation.claim_threshold=null", *base} <= set(words)
        assert not [word for word in words if word.endswith("=null") and word.partition("=")[0] not in overrides]
    trainer = MultiTurnRLTrainer("gsm8k", training_dataset="rows", overrides={"data.path": None}, run_dir="r")
    assert [word for word in trainer.command if word.startswith("data.path=")] == ["data.path=null"]
    cfg = compose(MultiTurnRLTrainer("gsm8k", overrides=overrides, run_dir=tmp_path / "run").command[3:])
    assert cfg.data.max_test_rows is None


@pytest.mark.slow
def test_a_trainer_trains_resumes_and_is_evaluated(tmp_path):
    quiet = {"preflight.at_start": "none", "evaluation.sampled_rows": 0, "evaluation.samples_per_row": 1}
    trainer = MultiTurnRLTrainer(overrides={"debug": "fast", **quiet}, run_dir=tmp_path / "run")
    lines = []
    assert trainer.train(lines.append)["steps"] == 2
    assert any("held out" in line for line in lines)
    trainer.command.append("trainer.max_steps=3")
    assert trainer.train(lines.append)["steps"] == 3

    folder = tmp_path / "report"
    report = MultiTurnRLEvaluator(trainer, output=folder).evaluate(evaluate_base_model=True, show=lines.append)
    assert report == json.loads((folder / "report.json").read_text())
    assert len(report["models"]) == 2


def test_the_error_contains_the_last_line_of_the_command(tmp_path):
    trainer = MultiTurnRLTrainer(overrides={"trainer.max_stepz": 2}, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match=r"mtrl.main .* ended with 2: .*trainer.max_steps"):
        trainer.train(lambda line: None)


def test_the_folder_of_results_may_be_an_override_or_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for trainer in (MultiTurnRLTrainer(overrides={"run_dir": "~/run"}), MultiTurnRLTrainer(run_dir="~/run")):
        assert trainer.run.path == tmp_path / "run"
        assert [word for word in trainer.command if word.startswith("run_dir=")] == [f"run_dir={tmp_path}/run"]
    for given in ({"overrides": {"evaluation.output": "~/report"}}, {"output": "~/report"}):
        evaluator = MultiTurnRLEvaluator("a/b", recipe="gsm8k", **given)
        assert evaluator.output == tmp_path / "report" and f"evaluation.output={tmp_path}/report" in evaluator.command


def run_program(code, folder, monkeypatch, show=None):
    """Run a module with this code as a command of the API, and return its lines."""
    (folder / "own_program.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(api.__file__).parent.parent)]))
    monkeypatch.setattr(api, "subprocess", subprocess)
    lines = []
    api.run_command([sys.executable, "-m", "own_program"], show or lines.append)
    return lines


def test_one_interruption_is_one_signal_to_the_command(monkeypatch, tmp_path):
    """A terminal sends Ctrl-C to all processes of the foreground, so the command must have a session of its own. It
    ends with the process that started it: signal 15 comes when the parent has ended."""
    lines = run_program(
        """
import ctypes, os
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print(os.getsid(0) == os.getpid(), number.value)
""",
        tmp_path,
        monkeypatch,
    )
    assert lines == ["True 15"]


def test_an_interrupted_command_may_print_more_than_a_pipe_holds(monkeypatch, tmp_path):
    code = """
import time
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("x" * 200_000, flush=True)
    open(__file__ + ".saved", "w").close()
"""

    def show(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_program(code, tmp_path, monkeypatch, show)
    assert (tmp_path / "own_program.py.saved").exists()


ROLE = "arn:aws:iam::123456789012:role/SageMakerRole"


@pytest.mark.slow
@pytest.mark.ci
def test_the_code_of_the_sagemaker_article_runs(tmp_path):
    """Steps 6 and 7 of the article on SageMaker AI run, with a debug run, a local MLflow and folders of the test.

    MLflow takes longer for each trajectory than the run for a step.
    """
    mlflow = pytest.importorskip("mlflow")
    server, lines = f"sqlite:///{tmp_path}/mlflow.db", []
    few = {"evaluation.sampled_rows": 0, "evaluation.samples_per_row": 1, "tracker.trajectories": 1}
    overrides = {"debug": "fast", "preflight.at_start": "none", **few}
    with pytest.warns(UserWarning, match=f"role={ROLE} has no effect"):
        trainer = MultiTurnRLTrainer(
            recipe="", role=ROLE, dataset="", mlflow_resource_arn=server, overrides=overrides, run_dir=tmp_path / "run"
        )
    with pytest.raises(UserError, match="has not begun; call train"):
        trainer.get_mlflow_url()
    trainer.train(lines.append)
    evaluator = MultiTurnRLEvaluator(
        model=trainer, dataset="", evaluate_base_model=True, s3_output_path=str(tmp_path / "report")
    )
    report = evaluator.evaluate(show=lines.append).wait()
    assert [len(report["models"]), report] == [2, json.loads((tmp_path / "report" / "report.json").read_text())]
    page, _, run_id = trainer.get_mlflow_url().rpartition("/runs/")
    assert "/#/experiments/" in page
    assert "val/reward/mean" in mlflow.MlflowClient(server).get_run(run_id).data.metrics


def test_arguments_of_the_service_are_accepted(tmp_path):
    evaluator = MultiTurnRLEvaluator(
        "a/b", recipe="gsm8k", agent_config="a.function", mlflow_resource_arn="arn:aws:sagemaker:x", output="o"
    )
    assert {"generator.agent.target=a.function", "tracker.report_to=[mlflow]"} < set(evaluator.command)
    assert override("tracker.mlflow.uri", "arn:aws:sagemaker:x") in evaluator.command
    assert MultiTurnRLTrainer(s3_output_path=tmp_path / "there").run.path == tmp_path / "there"
    with pytest.warns(UserWarning, match=r"accept_eula=True has no effect: the command runs on this machine"):
        MultiTurnRLEvaluator("a/b", recipe="gsm8k", accept_eula=True, output="o")


@pytest.mark.parametrize(
    ("service", "message"),
    [
        (
            {"agent_config": "arn:aws:bedrock-agentcore:us-west-2:1:runtime/mine"},
            "only a job on AWS can call; give",
        ),
        ({"s3_output_path": "s3://my-bucket/eval-output/base/"}, r"is an address, .*; give output=FOLDER, and copy it"),
    ],
)
def test_arguments_that_need_aws_are_refused(service, message):
    with pytest.raises(UserError, match=message):
        MultiTurnRLEvaluator("a/b", **service)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="rolle is no argument; those of SageMaker AI's SDK that are taken: agent"):
        MultiTurnRLTrainer(rolle=ROLE, run_dir="r")


def test_a_run_without_mlflow_is_refused_with_the_fix(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("name: mine\nenvironment: {name: gsm8k}\n")
    with pytest.raises(UserError, match="does not report to MLflow; give .*mtrl track .* --to mlflow"):
        MultiTurnRLTrainer(run_dir=run).get_mlflow_url()


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "openai-reasoning-gpt-oss-20b", "{folder}", "base"])
def test_a_model_without_a_task_needs_a_recipe(tmp_path, monkeypatch, model):
    """The constructor raises an error that names its arguments, before a folder is made."""
    monkeypatch.chdir(tmp_path)
    model = model.format(folder=tmp_path)
    with pytest.raises(UserError) as caught:
        MultiTurnRLEvaluator(model=model, dataset="rows.parquet")
    message = str(caught.value)
    assert message.startswith(f"model={model} does not belong to a run, so it has no task; give recipe=NAME")
    assert "gsm8k" in message and "evaluation.model" not in message and not list(tmp_path.iterdir())
    for named in ({"recipe": "sop"}, {"overrides": {"experiment": "sop"}}):
        command = MultiTurnRLEvaluator(model=model, **named).command
        assert {"experiment=sop", override("evaluation.model", model)} < set(command) and model not in command


@pytest.mark.parametrize("model", ["outputs/nope", "./nope", "/no/such/folder", "~/no-such-run", "a/b/c"])
def test_a_folder_that_is_missing_is_named(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UserError, match=f"^model={model} does not exist; name a run, its folder, a checkpoint or a"):
        MultiTurnRLEvaluator(model=model)


def test_a_model_of_a_run_needs_no_recipe(tmp_path):
    (tmp_path / "config.yaml").touch()
    for model in (tmp_path, tmp_path / "export", tmp_path / "checkpoints" / "best"):
        assert MultiTurnRLEvaluator(model, recipe="", output="o").command[-1] == str(model)


def test_a_trainer_may_be_named_before_it_trains_but_not_evaluated(tmp_path):
    evaluator = MultiTurnRLEvaluator(MultiTurnRLTrainer(run_dir=tmp_path / "run"), output=tmp_path / "report")
    with pytest.raises(UserError, match=r"the run in .*run has not begun; call train\(\) first"):
        evaluator.evaluate()


def test_the_threshold_of_success_is_an_argument():
    command = MultiTurnRLEvaluator("a/b", recipe="gsm8k", success_threshold=0.5, output="o").command
    assert "evaluation.success_threshold=0.5" in command
