"""A killed evaluation is resumed, and its result equals that of an uninterrupted one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mtrl
from mtrl.config.schema import Config, EvaluationConfig
from mtrl.errors import UserError
from mtrl.evaluation.identity import describe
from mtrl.evaluation.runner import fixed_batches
from mtrl.evaluation.sources import source_of
from mtrl.evaluation.store import Store, group_name
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests import forked
from tests.evaluation.outputs import metrics_of, report_of, trajectories_of

ROOT = Path(mtrl.__file__).parent.parent
SLOWLY = """
import sys, time
from mtrl.evaluation.store import Store
append = Store.append
def slowly(self, *args):
    append(self, *args)
    time.sleep(0.3)
Store.append = slowly
from mtrl.evaluation.command import cli
cli(sys.argv[1:])
"""
WORDS = ["evaluation.compare=[base]", "evaluation.rows=8", "evaluation.sampled_rows=4", "generator.max_num_seqs=4"]


def start(run, out, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SLOWLY, str(run), *WORDS, f"evaluation.output={out}"]
    return forked.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def episodes(out):
    return sum(path.read_bytes().count(b"\n") for path in out.glob("trajectories/*.jsonl"))


@pytest.mark.slow
def test_a_killed_evaluation_is_resumed_exactly(evaluate, run, tmp_path):
    """SIGKILL ends it twice, the second time with an incomplete line; tokens, log-probs and report are those of a whole
    evaluation, and complete groups are not sampled again."""
    assert evaluate(run, *WORDS, "evaluation.output=whole").status == 0
    out = tmp_path / "killed"
    for wanted in (5, 14):
        process = start(run, out, tmp_path)
        until = time.monotonic() + 120
        while episodes(out) < wanted and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
        assert wanted <= episodes(out) < 40
    newest = max((out / "trajectories").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    with newest.open("ab") as file:
        file.write(b'{"task_id": "test-')
    before = {path.name: path.read_text().splitlines()[:4] for path in (out / "trajectories").glob("*.jsonl")}
    done = evaluate(run, *WORDS, f"evaluation.output={out}")
    assert done.status == 0 and "going on with" in done.out, done.err
    assert trajectories_of(out) == trajectories_of(tmp_path / "whole")
    assert metrics_of(out) == metrics_of(tmp_path / "whole") and report_of(out) == report_of(tmp_path / "whole")
    kept = json.loads(before["small-step_2_greedy.jsonl"][0])["turns"][0]["seconds_generate"]
    again = json.loads((out / "trajectories" / "small-step_2_greedy.jsonl").read_text().splitlines()[0])
    assert again["turns"][0]["seconds_generate"] == kept, "it was run again"


def test_a_finished_evaluation_is_not_run_again(evaluate, run, tmp_path, monkeypatch):
    words = [run, "evaluation.rows=3", "evaluation.sampled_rows=0", "evaluation.output=out"]
    assert evaluate(*words).status == 0
    before, report = trajectories_of(tmp_path / "out"), report_of(tmp_path / "out")
    monkeypatch.setattr("mtrl.rollout.rollouts.Rollouts.group", None)
    monkeypatch.setattr("mtrl.trainer.setup.models.load_model", None)
    assert evaluate(*words).status == 0
    assert trajectories_of(tmp_path / "out") == before and report_of(tmp_path / "out") == report


def test_another_evaluation_is_refused(evaluate, refused, run, tmp_path):
    """The error names the different settings; settings that change no episode may differ."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    words = [copy, "evaluation.rows=3", "evaluation.sampled_rows=0", "evaluation.output=out"]
    assert evaluate(*words).status == 0
    for change, message in (
        ("evaluation.rows=4", "began with evaluation.rows=3, and this command has 4"),
        ("seed=5", "began with seed=0, and this command has 5"),
        ("generator.max_turns=2", "began with generator.max_turns=4, and this command has 2"),
        ("evaluation.compare=[base]", "began with the models copy-step_2, and this command has copy-step_2, base"),
    ):
        assert message in evaluate(*words, change).err
    assert evaluate(*words, "environment.max_workers=3", "evaluation.endpoint.timeout=9").status == 0
    weights = bytearray((copy / "export" / "model.safetensors").read_bytes())
    weights[-8] ^= 1
    (copy / "export" / "model.safetensors").write_bytes(weights)
    assert "began with another copy-step_2: its weights was" in evaluate(*words).err


def test_models_with_one_label_are_told_apart(tmp_path):
    """GGUF files of one name in two folders, and Hub names that give the same label."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.gguf").write_text(name)
    for texts in ([str(tmp_path / "a" / "m.gguf"), str(tmp_path / "b" / "m.gguf")], ["a/b_c", "a_b/c"]):
        one, other = (describe(source_of(text)) for text in texts)
        assert one["label"] == other["label"] and one["weights"] != other["weights"]
        assert one == describe(source_of(texts[0]))


# -- the store --------------------------------------------------------------------------------------------------------

ROWS = [{"id": f"r{n}", "prompt": [], "ground_truth": {}} for n in range(4)]


def group(place, samples=2, kind="sampled", stop=StopReason.DONE):
    message = {"role": "assistant", "content": "ä\u2028\n"}
    turn = Turn([1], [2], [-0.1], [(0, 1)], FinishReason.STOP, "ä", message)
    name = group_name(kind, place)
    return Group(name, ROWS[place], [Trajectory(f"r{place}", name, i, [turn], stop) for i in range(samples)])


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def test_stored_groups_are_read_back(store):
    for place in (2, 0, 3):
        store.append("m", "sampled", group(place))
    assert store.read("m", "sampled", ROWS, 2) == {place: group(place) for place in (0, 2, 3)}
    assert store.read("m", "greedy", ROWS, 1) == {} and store.read("other", "sampled", ROWS, 2) == {}


def test_half_of_a_surrogate_pair_is_stored(store):
    """The message of an error can hold one, for example in the name of a file."""
    failed = group(0)
    failed.trajectories[0].error = "no file caf\udce9"
    store.append("m", "sampled", failed)
    store.replace("m", "sampled", store.read("m", "sampled", ROWS, 2))
    assert store.read("m", "sampled", ROWS, 2) == {0: failed}


def test_a_kill_at_any_byte(store):
    """Whole groups before the kill stay, the rest is removed, and later writes complete the file."""
    for place in range(3):
        store.append("m", "sampled", group(place))
    path = store.path("m", "sampled")
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    for size in range(0, len(content) + 1, 37):
        path.write_bytes(content[:size])
        whole = sum(size >= sum(map(len, lines[: 2 * n])) for n in (1, 2, 3))
        kept = store.read("m", "sampled", ROWS, 2)
        assert sorted(kept) == list(range(whole))
        store.replace("m", "sampled", kept)
        for place in range(whole, 3):
            store.append("m", "sampled", group(place))
        assert path.read_bytes() == content


def test_failed_groups_are_run_again(store):
    store.append("m", "sampled", group(0, stop=StopReason.ENV_ERROR))
    store.append("m", "sampled", group(1))
    assert list(store.read("m", "sampled", ROWS, 2)) == [1]


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b"nothing\n", b'"x"\n'])
def test_a_damaged_line_in_the_middle(store, line):
    store.append("m", "sampled", group(0))
    with store.path("m", "sampled").open("ab") as file:
        file.write(line)
    store.append("m", "sampled", group(1))
    with pytest.raises(UserError, match=r"m_sampled.jsonl:3 is no trajectory .*; remove the line, or the file"):
        store.read("m", "sampled", ROWS, 2)


def test_other_rows(store):
    store.append("m", "sampled", group(3))
    with pytest.raises(UserError, match="is an episode of row r3, which is not in this evaluation"):
        store.read("m", "sampled", ROWS[:2], 2)


def test_a_kill_before_anything(tmp_path):
    from mtrl.evaluation.command import output_of

    config = Config(evaluation=EvaluationConfig(output=str(tmp_path)))
    for name in ("run.log", ".models.json.part"):
        (tmp_path / name).touch()
    assert output_of(config) == tmp_path
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds other things"):
        output_of(config)


@pytest.mark.parametrize(("rows", "samples", "together"), [(10, 1, 4), (10, 3, 8), (5, 9, 4), (3, 1, None), (1, 1, 1)])
def test_fixed_batches_contain_every_row_once(rows, samples, together):
    """Every row is in one; none is larger than the engine, unless a single row is."""
    batches = fixed_batches(rows, samples, together)
    assert [place for batch_size in batches for place in batch_size] == list(range(rows))
    assert all(len(batch_size) * samples <= (together or samples) or len(batch_size) == 1 for batch_size in batches)
