"""Every error is one sentence with the key, the value and the fix, and settings without effect cause a warning."""

import json

import pytest

from mtrl.errors import UserError
from mtrl.evaluation.settings import idle
from mtrl.evaluation.sources import source_of, sources_of
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock
from tests.evaluation.conftest import TASK


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders that resemble models."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "adapter", "young/trajectories", "outside/step_000003", "old/checkpoints/step_000004"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for run in ("young", "old", "done"):
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / "config.yaml").write_text("environment: {name: gsm8k}")
    (tmp_path / "done" / "models.json").write_text("[]")
    for step in ("outside/step_000003", "old/checkpoints/step_000004"):
        (tmp_path / step / "state.json").write_text('{"score": null}')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere at all", "evaluation.model=nowhere at all does not exist; write base, a run"),
        ("./typo", "evaluation.model=./typo does not exist"),
        ("/no/such/folder", "does not exist"),
        ("file.txt", "file.txt is a file"),
        ("empty", "empty holds neither a model (config.json) nor a run (config.yaml)"),
        ("adapter", "holds a LoRA adapter and no model; merge it"),
        ("young", "young has no weights yet: neither export/ nor a checkpoint"),
        ("done", "done is an evaluation and has no weights; continue it with evaluation.output=done"),
        ("outside/step_000003", "is a checkpoint outside of its run"),
        ("old/checkpoints", "is a folder of checkpoints; old/checkpoints has best, latest, step_000004"),
        ("old/checkpoints/best", "no checkpoint was evaluated, so none is the best"),
        ("old/checkpoints/step_000007", "does not exist; old/checkpoints has best, latest, step_000004"),
        ("young/checkpoints/latest", "does not exist; young/checkpoints has no checkpoint"),
        ("http://localhost:8000/v1", "does not name the model of the endpoint; write MODEL@http://localhost:8000/v1"),
        ("m@http://localhost:8000", "has no host or no path; write MODEL@http://HOST:PORT/v1"),
        ("m@http:///v1", "has no host or no path"),
        ("m@http://a:b@host/v1", "evaluation.model holds a password; write it without"),
        ("m@http://host/v1?key=5", "has a query behind its path"),
        ("m@http://host:99999999/v1", "is no address"),
        ("  ", "evaluation.model is empty"),
    ],
)
def test_texts_that_are_no_model(folders, text, words):
    with pytest.raises(UserError) as error:
        source_of(text)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_sources(folders):
    source = source_of("org/some-model@https://api.example.com/v1/chat/completions")
    assert (source.kind, source.model, source.url) == ("endpoint", "org/some-model", "https://api.example.com/v1")
    assert source.label == "org_some-model" and source.step == 0
    assert source_of("Qwen/Qwen2.5-0.5B").kind == "hub"
    assert source_of("old").step == 4 and source_of("old").kind == "checkpoint", "of a run that goes on: the newest"
    labels = [source.label for source in sources_of(["m@http://a/v1", "m@http://b/v1", "base"])]
    assert labels == ["m", "m-2", "base"]
    with pytest.raises(UserError, match="evaluation.compare: base and base are the same model"):
        sources_of(["base", "base"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evaluation.pass_k_values=[1,8]"], "evaluation.pass_k_values=[1,8] must lie from 1 to"),
        (["evaluation.rows=0"], "evaluation.rows=0 must be at least 1"),
        (["evaluation.split=dev"], "evaluation.split=dev is not known"),
        (["evaluation.split=validation"], "evaluation.split=validation has no rows; set data.validation_rows"),
        (["evaluation.confidence=1"], "evaluation.confidence=1"),
        (["evaluation.modell=x"], "evaluation.modell=x is not a key of mtrl; did you mean evaluation.model"),
        (["somewhere"], "somewhere is no run, for it has no config.yaml"),
        (["evaluation.compare=[base]"], "evaluation.compare: base and base are the same model"),
        (["evaluation.model=does/not-exist"], "evaluation.model=does/not-exist cannot be loaded"),
        (["evaluation.output=/dev/null/x"], "evaluation.output=/dev/null/x cannot be made"),
        (["evaluation.endpoint.max_concurrent=0"], "evaluation.endpoint.max_concurrent=0 must be at least 1"),
    ],
)
def test_wrong_commands(evaluate, words, sentence):
    done = evaluate(*TASK, *words)
    assert done.status == 2 and sentence in done.err.splitlines()[-1], done.err


def test_two_evaluations_cannot_write_one_folder(evaluate, tmp_path):
    """It is the lock of a run, by which readers see that an evaluation has a process."""
    with RunLock(RunDir(tmp_path)):
        done = evaluate(*TASK, f"evaluation.output={tmp_path}")
        assert Run(tmp_path).is_alive
    assert done.status == 2 and f"evaluation.output={tmp_path} is being written by another evaluation" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"run.log"}


def test_a_run_and_an_experiment(refused, run):
    message = refused(run, "+experiment=text_to_sql")
    assert "has its own configuration, which cannot be combined with an experiment" in message


def test_two_runs(refused, run):
    assert "a second run; name further models in evaluation.compare" in refused(run, run)


def test_the_folder_of_a_run_is_not_written_into(refused, run):
    before = (run / "run.log").read_bytes()
    assert "holds other things than an evaluation; name a new folder" in refused(run, f"evaluation.output={run}")
    assert (run / "run.log").read_bytes() == before


@pytest.mark.parametrize(
    "sentences",
    [
        {
            "evaluation.split=train": "evaluation.split=train: these are rows to train on",
            "trainer.max_steps=5": "trainer.max_steps=5, evaluation.every_steps=5 changes nothing here",
            "evaluation.every_steps=5": "evaluation.every_steps=5 changes nothing here: an evaluation does not train",
            "evaluation.endpoint.timeout=5": "evaluation.endpoint.timeout changes nothing, for no model is an endpoint",
            "generator.eval_sampling_params.temperature=0": "the sampled episodes of a row are all its greedy one",
        },
        {
            "evaluation.rows=500": "500 rows were requested, and test has 12: all of them",
            "data.max_test_rows=null": "500 rows",
            "evaluation.sampled_rows=0": "has no effect with evaluation.sampled_rows=0, which samples no row",
        },
        {"evaluation.rows=500": "evaluation.rows=500 is limited to data.max_test_rows=12"},
    ],
)
def test_settings_without_effect_cause_a_warning(evaluate, run, sentences):
    done = evaluate(run, "evaluation.rows=2", "evaluation.sampled_rows=1", *sentences)
    assert done.status == 0, done.err
    for sentence in sentences.values():
        assert sentence in done.out, done.out


def test_an_unencrypted_api_key_causes_a_warning(monkeypatch):
    from mtrl.config.schema import Config
    from mtrl.evaluation.settings import unencrypted_keys

    sources = [source_of("m@http://far.example/v1"), source_of("m@http://127.0.0.1/v1"), source_of("m@https://a.b/v1")]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert unencrypted_keys(Config(), sources) == []
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    (warning,) = unencrypted_keys(Config(), sources)
    assert "goes unencrypted to far.example; use https" in warning


def test_a_model_of_another_task(run, monkeypatch):
    from types import SimpleNamespace

    from mtrl.evaluation.settings import trained_elsewhere

    config = SimpleNamespace(environment=SimpleNamespace(name="text_to_sql", target=None))
    (warning,) = trained_elsewhere(config, [source_of(str(run))])
    assert "was trained on gsm8k, and this is text_to_sql" in warning


def test_help_imports_no_heavy_packages():
    import subprocess
    import sys

    code = "import sys, mtrl.evaluation.command as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'matplotlib', 'mlflow', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "mtrl evaluate RUN" in done.stdout


def test_sampling_of_evaluations_is_its_own(evaluate, run, tmp_path):
    """Length, temperature and stop strings of evaluations do not follow those of training."""
    own = ["generator.eval_sampling_params={max_generate_length: 3, temperature: 0.5}", "evaluation.output=out"]
    assert evaluate(run, "evaluation.rows=2", "evaluation.sampled_rows=1", *own).status == 0
    files = (tmp_path / "out" / "trajectories").iterdir()
    turns = [turn for file in files for line in file.read_text().splitlines() for turn in json.loads(line)["turns"]]
    assert turns and all(len(turn["action_ids"]) <= 3 for turn in turns)


def test_a_section_of_which_any_key_is_read_has_an_effect():
    assert idle(["tracker=mlflow", "+tracker=wandb", "trainer.threads=1"]) == []
    assert "tracker.plots=false, algorithm=gae changes nothing" in idle(["tracker.plots=false", "algorithm=gae"])[0]
