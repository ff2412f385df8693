"""Whole runs as programs: killed and resumed, stopped, on real rows, and with invalid environments."""

import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import NO_EVALUATION, ROOT, finish, rows_of, start, weights_of

import mtrl
from mtrl.types import read_trajectories
from tests import forked

REAL_ROWS = ROOT.parent / "shared" / "data" / "gsm8k"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]


@pytest.fixture(scope="module")
def undisturbed(whole_run):
    return whole_run


def test_the_run_folder_has_all_documented_files(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    files = {
        "SHA256SUMS",
        "config.yaml",
        "metrics.jsonl",
        "preflight.json",
        "rows.jsonl",
        "run.log",
        "status.txt",
        "summary.json",
        "timeline.jsonl",
    }
    assert names - {"alarms.jsonl"} == {*files, "timeline.jsonl", "trajectories", "checkpoints", "export", "tokenizer"}
    summary = json.loads((undisturbed / "summary.json").read_text())
    moments = [f"{name}_{when}" for name in ("success", "success_sampled", "reward") for when in ("before", "after")]
    assert all(isinstance(summary[key], float) for key in moments)
    assert summary["steps"] == 8 and summary["seed"] == 0 and summary["versions"]["mtrl"] == mtrl.__version__
    assert [row["step"] for row in rows_of(undisturbed)] == list(range(9))
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir())[-1] == "step_000008"


def test_engine_and_trainer_agree_over_the_whole_run(undisturbed):
    drifts = [row["analysis/logprob_drift/max"] for row in rows_of(undisturbed) if "analysis/logprob_drift/max" in row]
    assert len(drifts) >= 6 and max(drifts) < 1e-4


def test_metrics_have_the_names_of_the_source_documents(undisturbed):
    """The names are those of R119-R127, with completion apart from correctness (R128)."""
    names = set().union(*rows_of(undisturbed))
    rollout = {"reward/mean", "reward/zero_frac", "reward/valid_mean", "turns/mean", "tokens/response_max"}
    assert {f"rollout/{name}" for name in rollout} <= names
    assert {"analysis/zero_adv_groups", "val/reward/mean", "val/reward/pass_k_1", "val/success/pass_k_1"} <= names
    assert {"rollout/completion/mean", "rollout/success/mean", "val/completion/mean", "val/success/mean"} <= names


def test_an_evaluation_is_of_one_policy_version(undisturbed):
    """Every token of an evaluation was sampled by the weights of its step."""
    files = sorted((undisturbed / "trajectories").glob("eval_*.jsonl"))
    assert len(files) >= 4
    for file in files:
        step = int(file.stem.rpartition("_")[2])
        versions = {v for t in read_trajectories(file) for turn in t.turns for v in turn.versions}
        assert versions == {step}, file.name


def test_saved_training_trajectories_have_advantages_and_trainer_log_probs(undisturbed):
    """The trainer's log-probs equal the engine's, and every turn has its advantage."""
    for file in sorted((undisturbed / "trajectories").glob("train_*.jsonl")):
        turns = [turn for t in read_trajectories(file) for turn in t.turns]
        assert all(len(turn.advantages) == 1 for turn in turns)
        looked_at = [turn for turn in turns if turn.trainer_logprobs]
        assert len(looked_at) >= sum(turn.advantages != [0.0] for turn in turns) > 0
        for turn in looked_at:
            assert turn.trainer_logprobs == pytest.approx(turn.action_logprobs, abs=1e-4)


def test_the_timeline_has_every_phase_of_every_step(undisturbed):
    spans = [json.loads(line) for line in (undisturbed / "timeline.jsonl").read_text().splitlines()]
    for step in range(1, 9):
        names = [span["name"] for span in spans if span["step"] == step]
        assert names[:4] == ["generate", "credit", "update", "sync"]
    assert all(a["end"] <= b["start"] + 1e-5 for a, b in itertools.pairwise(spans))


def test_held_out_rows_are_not_trained_on(undisturbed):
    def tasks(pattern):
        files = (undisturbed / "trajectories").glob(pattern)
        return {json.loads(line)["task_id"] for file in files for line in file.read_text().splitlines()}

    held_out, trained = tasks("eval_*.jsonl"), tasks("train_*.jsonl")
    assert held_out and trained and not held_out & trained


@pytest.mark.parametrize("write", [5, 7])
def test_a_run_killed_during_a_checkpoint_resumes_exactly(undisturbed, tmp_path, write):
    """Invariant 6: the process kills itself while it writes its `write`-th file, of the first or the second checkpoint.
    Each has five files, which are written during the next step."""
    code = f"""
    import os, signal, mtrl.trainer.checkpoint.checkpoint as checkpoint
    from pathlib import Path
    begun = [0]
    def dying(real):
        def write(*arguments):
            begun[0] += 1
            if begun[0] == {write}:
                next(a for a in arguments if isinstance(a, Path)).write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)
        return write
    checkpoint.write_file = dying(checkpoint.write_file)
    import mtrl.trainer.checkpoint.tensors as tensors
    tensors.write_tensors = dying(tensors.write_tensors)
    """
    run_dir = tmp_path / "run"
    finish(start(run_dir, code=code), expected=-signal.SIGKILL)
    whole = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.startswith("step")]
    assert whole == ([] if write <= 5 else ["step_000002"])
    finish(start(run_dir, "resume=latest"))
    assert rows_of(run_dir) == rows_of(undisturbed)
    assert weights_of(run_dir) == weights_of(undisturbed)


SLOW = """
import asyncio
from mtrl.trainer.data.experience import Collector
collect = Collector.collect

async def slow(self, step):
    await asyncio.sleep(600 if step == 3 else 0)
    return await collect(self, step)

Collector.collect = slow
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_prints_the_resume_command(undisturbed, tmp_path, number, status):
    run_dir = tmp_path / "run"
    process = start(run_dir, code=SLOW.replace("600 if step == 3 else 0", "0.5 if step > 1 else 0"))
    while len((run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    output = finish(process, expected=status)
    assert f"{number.name}: saved at step" in output and "resume=latest" in output
    steps = len(rows_of(run_dir)) - 1
    assert steps < 8 and (run_dir / "checkpoints" / f"step_{steps:06d}").is_dir()
    if number == signal.SIGTERM:  # the checkpoint does not depend on the signal
        finish(start(run_dir, "resume=latest"))
        assert rows_of(run_dir) == rows_of(undisturbed)
        assert weights_of(run_dir) == weights_of(undisturbed)


def test_a_second_signal_ends_the_run_at_once_and_reports_unsaved_steps(tmp_path):
    """The signal is Ctrl-C; SIGTERM comes twice during the last save, in a test below."""
    run_dir = tmp_path / "run"
    process = start(run_dir, code=SLOW)
    metrics, saved, log = run_dir / "metrics.jsonl", run_dir / "checkpoints" / "step_000002", run_dir / "run.log"
    for is_there in (
        lambda: saved.exists() and metrics.read_bytes().count(b"\n") == 4,
        lambda: "asked to stop" in log.read_text(),
    ):
        while not is_there():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    output = finish(process, expected=130)
    text = "SIGINT: the run ended at once, and the steps after its checkpoint step_000002 are not saved; go on"
    assert text in output and "Traceback" not in output
    assert (run_dir / "status.txt").read_text() == "stopped\n"


SLOW_SAVE = """
import time
from mtrl.trainer.checkpoint.checkpoint import Checkpoints
commit = Checkpoints.commit

def slow(self, partial, *rest):
    run_dir = self.folder.parent
    if "step_000003" in partial.name:
        (run_dir.parent / "saving").touch()
        while not (run_dir.parent / "go").exists():
            time.sleep(0.01)
    return commit(self, partial, *rest)

Checkpoints.commit = slow
"""


def started_until_its_last_save(tmp_path):
    """Start a run of three steps whose last checkpoint is not completed before the file `go` exists."""
    process = start(tmp_path / "run", "trainer.max_steps=3", code=SLOW_SAVE)
    while not (tmp_path / "saving").exists():
        assert process.poll() is None
        time.sleep(0.01)
    return process


def test_a_signal_during_the_last_save_waits_for_it(tmp_path):
    """Earlier, SIGTERM killed the run at this point without a message, and its status stayed `running`."""
    run_dir, process = tmp_path / "run", started_until_its_last_save(tmp_path)
    process.send_signal(signal.SIGTERM)
    while "asked to stop" not in (run_dir / "run.log").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    (tmp_path / "go").touch()
    output = finish(process, expected=75)
    assert "SIGTERM: saved at step 3" in output and "Traceback" not in output
    assert (run_dir / "status.txt").read_text() == "stopped\n"
    finish(start(run_dir, "trainer.max_steps=3", "resume=latest"))
    assert (run_dir / "status.txt").read_text() == "finished\n"
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2, 3] and weights_of(run_dir)


def test_a_second_signal_during_the_last_save_does_not_wait_for_it(tmp_path):
    run_dir, process = tmp_path / "run", started_until_its_last_save(tmp_path)
    process.send_signal(signal.SIGTERM)
    while "asked to stop" not in (run_dir / "run.log").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output = finish(process, expected=143)
    assert "SIGTERM: the run ended at once, and the steps after its checkpoint step_000002 are not saved" in output
    assert "Traceback" not in output and not (run_dir / "checkpoints" / "step_000003").exists()
    assert (run_dir / "status.txt").read_text() == "stopped\n"


LOST = """
from mtrl.engines.base import EngineLostError
from mtrl.engines.local.engine import LocalEngine
from mtrl.trainer.publisher import Publisher
publish, generate = Publisher.publish, LocalEngine.generate

async def no_publish(self, version):
    if version == 5:
        raise EngineLostError("the engine is lost")
    return await publish(self, version)

async def no_generate(self, *words):
    if self.version == 5:
        raise EngineLostError("the engine is lost")
    return await generate(self, *words)

asked = 0

async def no_last_evaluation(self, *words):
    global asked
    asked += self.version == 8
    if asked > 20:  # most of its episodes are over
        raise EngineLostError("the engine is lost")
    return await generate(self, *words)

"""


@pytest.mark.parametrize(
    ("loses", "step"),
    [
        ("Publisher.publish = no_publish", 5),
        ("LocalEngine.generate = no_generate", 5),
        ("LocalEngine.generate = no_last_evaluation", 8),
    ],
    ids=["publish", "generate", "last evaluation"],
)
def test_a_lost_engine_loses_no_step(undisturbed, tmp_path, loses, step):
    """The engine is lost while weights are sent or turns are sampled. The trained steps are saved, and the run can be
    resumed."""
    run_dir, words = tmp_path / "run", ["evaluation.before_train=false", "evaluation.every_steps=0"]
    output = finish(start(run_dir, *words, "trainer.checkpoint.every_steps=0", code=LOST + loses), expected=2)
    assert output.strip().splitlines()[-1] == "the engine is lost" and "episodes failed" not in output
    assert not (run_dir / "summary.json").exists()
    assert [path.name for path in (run_dir / "checkpoints").glob("step_*")] == [f"step_{step:06}"]
    finish(start(run_dir, *words, "resume=latest"))
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert [row["step"] for row in rows_of(run_dir)] == [*range(1, 9)], "a step that was not published is recorded"


def test_the_single_message_layout_trains_without_a_break(tmp_path):
    run_dir = tmp_path / "run"
    finish(start(run_dir, *NO_EVALUATION, "generator.use_conversation_multi_turn=false", "trainer.max_steps=2"))
    rows = rows_of(run_dir)
    assert rows[-1]["step"] == 2 and rows[-1]["rollout/breaks"] == 0.0
    assert rows[-1]["analysis/logprob_drift/max"] < 1e-4


def test_any_hugging_face_folder_trains(make_chatml_tokenizer, tmp_path):
    """The model is a Llama with random weights and its own chat template, loaded by the code for real models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, folder = make_chatml_tokenizer(), tmp_path / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run_dir = tmp_path / "run"
    short = "environment.prompt=short"  # the context of this model is too short for full prompts
    words = [short, "trainer.max_steps=1", *NO_EVALUATION]
    finish(start(run_dir, "model=hf", f"model.path={folder}", *words, "model.tiny={}"))
    assert rows_of(run_dir)[-1]["step"] == 1 and rows_of(run_dir)[-1]["rollout/breaks"] == 0.0
    finish(start(tmp_path / "again", "model=hf", f"model.path={run_dir}/export", *words))


def test_the_command_to_train_further_contains_the_users_config_groups(tmp_path):
    groups, run_dir = tmp_path / "groups", tmp_path / "run"
    (groups / "experiment").mkdir(parents=True)
    own = (
        "# @package _global_\ndefaults: [gsm8k, _self_]\nevaluation: {before_train: false, rows: 4, sampled_rows: 0}\n"
    )
    (groups / "experiment" / "mine.yaml").write_text(own)
    words = [f"--config-dir={groups}", "experiment=mine", "trainer.max_steps=1"]
    printed = finish(start(run_dir, *words)).partition("train on from here:")[2].split("\n")[1]
    mtrl, train, *overrides = shlex.split(printed)
    assert (mtrl, train) == ("mtrl", "train")
    command = [sys.executable, "-m", "mtrl.main", *overrides]
    forked.run(command, check=True, capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert rows_of(run_dir)[-1]["step"] == 2


@pytest.mark.skipif(not REAL_ROWS.is_dir(), reason="the real GSM8K rows are not on this machine")
def test_the_loop_runs_on_the_real_rows(tmp_path):
    run_dir = tmp_path / "run"
    words = (
        "experiment=gsm8k_multi_turn",
        f"data.path={REAL_ROWS}",
        "trainer.max_steps=2",
        "model.warm_start.check_every=2",
        *NO_EVALUATION,
    )
    finish(start(run_dir, *words))
    assert rows_of(run_dir)[-1]["step"] == 2
    assert "7473 training rows, 256 held out" in (run_dir / "run.log").read_text()


BAD_ENVIRONMENT = """
import time
from pathlib import Path
from types import SimpleNamespace
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Splits

class Bad(BaseEnvironment):
    def step(self, response, ground_truth):
        if response == "fine": return 0.0, None, True
        {body}

    @staticmethod
    def load(data, seed, **config):
        rows = [dict(id=str(i), prompt=[dict(role="user", content=f"row {{i}}")], ground_truth={{}}) for i in range(40)]
        return Splits(rows[:30], rows[30:])

    @staticmethod
    def demonstrate(row, rng):
        return SimpleNamespace(act=lambda observation: {text!r})
"""
BAD_STEPS = {
    "raises": ("raise RuntimeError('the tool broke')", "the tool broke"),
    "hangs": ("time.sleep(600)", "environment.step_timeout=1.0"),
    "nonsense": ("return 'no'", "Bad.step returned 'no'; it must return (reward, observation, done) or a StepResult"),
    "exits": ("import os; os._exit(0)", "os._exit(0) in an environment"),
    "nan": ("return float('nan'), None, True", "Bad.step returned the reward nan; it must be a finite number"),
}


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        *((fault, "demonstrations") for fault in BAD_STEPS),
        *((fault, "rollouts") for fault in ("raises", "hangs", "exits")),
    ],
)
def test_an_invalid_environment_is_an_error_in_one_sentence(tmp_path, fault, moment):
    body, message = BAD_STEPS[fault]
    # The policy of a two-step warm start never samples "fine", so an environment that needs it fails only in rollouts.
    text = "fine" if moment == "rollouts" else "hello"
    (tmp_path / "bad_environment.py").write_text(BAD_ENVIRONMENT.format(body=body, text=text))
    words = [
        "environment.target=bad_environment.Bad",
        "name=bad",
        "environment.config={}",
        "environment.step_timeout=1",
        "reward=default",
    ]
    words += ["environment.retries=0", "model.warm_start.check_every=2"]
    output = finish(start(tmp_path / "run", *words), expected=2)
    sentence = output.strip().splitlines()[-1]
    assert message in sentence and "Traceback" not in output
    assert ("environment.max_failed_share=0.5" if moment == "rollouts" else "demonstration of row 0") in sentence
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


def test_a_relative_run_folder_does_not_change_with_the_working_directory(tmp_path):
    body = (
        "import os, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder); return 0.0, None, True"
    )
    (tmp_path / "bad_environment.py").write_text(BAD_ENVIRONMENT.format(body=body, text="hello"))
    words = ["environment.target=bad_environment.Bad", "name=bad", "environment.config={}", "reward=default"]
    words += [*NO_EVALUATION, "model.warm_start.check_every=2", "trainer.max_steps=2"]
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r})"
    finish(start(Path("run"), *words, code=code))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert len(rows_of(tmp_path / "run")) == 2


def test_an_unreadable_checkpoint_is_an_error_in_one_sentence_and_leaves_the_run_unchanged(undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    bad = run_dir / "checkpoints" / "step_000008"
    (bad / "model.safetensors").write_bytes(b"rubbish")
    output = finish(start(run_dir, f"resume={bad}", "trainer.max_steps=9"), expected=2)
    last = output.strip().splitlines()[-1]
    assert f"checkpoint {bad} cannot be read" in last and "give another one: resume=" in last
    assert (run_dir / "config.yaml").read_bytes() == (undisturbed / "config.yaml").read_bytes()


def test_a_prompt_longer_than_the_context_is_an_error_in_one_sentence(tmp_path):
    output = finish(
        start(
            tmp_path / "run",
            "model.tiny.context=16",
            "model.warm_start.check_every=2",
            "generator.sampling_params.max_generate_length=8",
        ),
        expected=2,
    )
    assert "does not fit generator.max_context_length=16" in output.strip().splitlines()[-1]


def test_the_folder_of_a_failed_start_can_be_reused(tmp_path):
    run_dir = tmp_path / "run"
    refused = finish(start(run_dir, "model=hf", f"model.path={tmp_path}", "model.tiny={}"), expected=2)
    assert "cannot be loaded" in refused.strip().splitlines()[-1]
    finish(start(run_dir, *NO_EVALUATION, "trainer.max_steps=1"))
    assert "cannot be loaded" in (run_dir / "run.log").read_text() and rows_of(run_dir)[-1]["step"] == 1


def test_a_malformed_data_file_names_the_line(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n')
    (tmp_path / "test.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
    output = finish(start(tmp_path / "run", "experiment=gsm8k_multi_turn", f"data.path={tmp_path}"), expected=2)
    last = output.strip().splitlines()[-1]
    assert "train.jsonl" in last and "2" in last
