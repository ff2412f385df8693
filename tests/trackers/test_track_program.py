"""mtrl track sends the rest of a run, reports what arrived, and can be repeated."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from follow_runs import add_step, make_run, tracker

pytest.importorskip("tensorboard")

import mtrl
from mtrl.command.program import one_sentence
from mtrl.track import main, parse
from mtrl.trackers.sending import SendResult, lines
from mtrl.trackers.settings import run_at, tracker_of
from mtrl.trackers.start import follower_of
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=3)


def sentence(capsys, *words):
    """Return the error of a wrong command, which ends with status 2."""
    with pytest.raises(SystemExit) as exit_, one_sentence():
        main([str(word) for word in words])
    assert exit_.value.code == 2
    return capsys.readouterr().err.strip()


def test_unsent_pieces_are_sent_and_none_twice(run, capsys):
    assert main([str(run), "--to", "tensorboard"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["tensorboard", "sent", "11", "left", "0", str(run.path / "tensorboard")]
    assert second == f"tensorboard: tensorboard --logdir {run.path / 'tensorboard'}"
    files = list((run.path / "tensorboard").iterdir())
    assert main([str(run), "--to", "tensorboard"]) == 0
    assert list((run.path / "tensorboard").iterdir()) == files, "nothing was opened"
    add_step(run, 3)
    assert main([str(run), "--to", "tensorboard"]) == 0
    assert " 12 " in capsys.readouterr().out.splitlines()[-2]


def test_a_last_row_without_a_line_end_is_reported_once(run, capsys):
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "a"')
    assert main([str(run), "--to", "tensorboard", "--to", "tensorboard"]) == 0
    output = capsys.readouterr().err
    assert output.count(f"warning: {run.metrics}:4 has no end") == output.count("has no end") == 1


def test_a_refused_piece_is_named_with_its_reason(run, capsys):
    with (run.trajectories / "train_step_000002.jsonl").open("a") as file:
        file.write('"no trajectory"\n')
    for _ in range(2):
        assert main([str(run), "--to", "tensorboard"]) == 0
        output = capsys.readouterr()
        assert output.out.splitlines()[0].endswith("   1 refused")
        expected = (
            "warning: tensorboard refused 1 of the run's pieces, such as trajectories/train_step_000002.jsonl:4: it is "
            "no trajectory ("
        )
        assert output.err.startswith(expected) and output.err.count("\n") == 1


def test_the_trackers_of_the_configuration_are_used(run, capsys):
    run.config.write_text(run.config.read_text() + "tracker:\n  report_to: [tensorboard]\n  of_an_older_version: 1\n")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("tensorboard")


def test_unsent_pieces_give_status_1_and_the_reason(run, capsys):
    pytest.importorskip("wandb")
    assert main([str(run), "--to", "wandb", "--to", "tensorboard", "tracker.wandb.entity=someone"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split()[:5] == ["wandb", "sent", "0", "left", "11"]
    assert output.out.splitlines()[1].split()[:5] == ["tensorboard", "sent", "11", "left", "0"]
    assert "warning: wandb: W&B has no API key" in output.err


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


def test_a_run_that_sends_itself_is_left_alone(run, capsys):
    holder = follower_of("tensorboard", run, tracker("tensorboard"))
    assert main([str(run), "--to", "tensorboard"]) == 0
    assert "being sent by the run itself" in capsys.readouterr().out
    holder.release()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("RUN",), "reports to no tracker; name one: --to mlflow"),
        (("RUN", "--to", "tensorbord"), "did you mean tensorboard?"),
        (("RUN", "--to", "tensorboard", "tracker.projekt=x"), "did you mean tracker.project=x?"),
        (("RUN", "--to", "tensorboard", "trainer.max_steps=3"), "changes nothing here: sending a run reads tracker.*"),
        (("RUN", "--to", "tensorboard", "tracker.trajectories=many"), "must be an integer"),
        (("RUN", "--to", "tensorboard", "tracker.trajectories=-1"), "tracker.trajectories=-1 must be at least 0"),
        (("RUN", "--to", "tensorboard", "tracker.wandb.mode=ofline"), "did you mean offline"),
        (("RUN", "--to", "tensorboard", "tracker"), "tracker is no setting"),
    ],
)
def test_wrong_commands_are_reported_in_one_sentence(run, capsys, words, expected):
    error = sentence(capsys, *(run if word == "RUN" else word for word in words))
    assert expected in error and "\n" not in error


def test_an_unused_setting_causes_a_warning(run):
    _, warnings = tracker_of(run, ["tensorboard"], ["tracker.mlflow.uri=http://127.0.0.1:1"])
    assert warnings == ["tracker.mlflow.uri=http://127.0.0.1:1 has no effect with tracker.report_to=['tensorboard']"]


def test_a_folder_without_a_configuration_is_no_run(tmp_path, capsys):
    assert "is no run, for it has no config.yaml" in sentence(capsys, tmp_path)
    assert run_at(str(make_run(tmp_path / "run"))).config.is_file()


def test_columns_are_aligned():
    shown = lines(
        [
            SendResult("mlflow", 1200, {"rows": 3, "files": 1}, url="http://a"),
            SendResult("tensorboard", 5, {}, refused=2, url="b"),
            SendResult("wandb", is_busy=True),
        ]
    )
    assert shown == [
        "mlflow        sent  1,200   left      4      http://a",
        "tensorboard   sent      5   left      0      b   2 refused",
        "wandb         being sent by the run itself",
    ]
    assert parse(["RUN", "--follow"]).follow


@pytest.mark.slow
def test_it_follows_a_run_until_its_end(run):
    """The program sends new pieces, and ends when the run has written its summary."""
    command = [sys.executable, "-m", "mtrl.track", str(run), "--to", "tensorboard", "--follow"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = forked.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not any("metrics.jsonl:2" in path.read_text() for path in run.path.glob("trackers/tensorboard-*")):
        time.sleep(0.1)
        assert program.poll() is None, program.communicate()
    add_step(run, 3)
    run.write_summary({"steps": 4})
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    assert output.split()[:5] == ["tensorboard", "sent", "13", "left", "0"]


def test_following_a_killed_run_ends_and_says_why(run, capsys):
    run.status.write_text("running\n")
    for file in run.path.rglob("*"):
        os.utime(file, (1, 1))
    assert main([str(run), "--to", "tensorboard", "--follow"]) == 0
    printed = capsys.readouterr()
    assert "counts as killed, since it has no process on this machine" in printed.err and "left      0" in printed.out


@pytest.mark.slow
def test_following_ends_by_ctrl_c(run):
    command = [sys.executable, "-m", "mtrl.track", str(run), "--to", "tensorboard", "--follow"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = forked.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not any("metrics.jsonl:2" in path.read_text() for path in run.path.glob("trackers/tensorboard-*")):
        time.sleep(0.1)
        assert program.poll() is None, program.communicate()
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    assert "left      0" in output
