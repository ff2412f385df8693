"""`torchrun --max-restarts`: each attempt continues in the folder of the attempt before."""

import sys
import types

import pytest

from mtrl.errors import UserError
from mtrl.main import prepare
from mtrl.utils import process


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Function `attempt(…)` that trains as the next attempt of one launch, and returns its folder and `resume`."""
    trained = []
    stand_in = types.SimpleNamespace(train=lambda cfg, hooks: trained.append(cfg) or {})
    monkeypatch.setitem(sys.modules, "mtrl.trainer.run", stand_in)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)

    def attempt(*words):
        prepare(words)()
        return trained[-1].run_dir, trained[-1].resume

    return attempt


def begin(run_dir, tmp_path, checkpoints=0):
    (tmp_path / run_dir / "metrics.jsonl").touch()
    for step in range(checkpoints):
        (tmp_path / run_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


@pytest.mark.parametrize("words", [[], ["run_dir=there"], ["run_dir=runs/${now:%f}"]], ids=["default", "named", "time"])
def test_the_attempts_of_a_launch_share_a_folder(attempt, tmp_path, words):
    first, resume = attempt(*words)
    assert resume == "none"
    assert attempt(*words) == (first, "none")  # the attempt was lost before it had begun
    begin(first, tmp_path)
    assert attempt(*words) == (first, "latest")
    begin(first, tmp_path, checkpoints=1)
    assert attempt(*words) == (first, "latest")
    assert [path.name for path in (tmp_path / first).parent.iterdir()] == [first.rpartition("/")[2]]


def test_another_launch_has_a_folder_of_its_own(attempt, tmp_path, monkeypatch):
    first, _ = attempt("run_dir=runs/${now:%f}")
    begin(first, tmp_path)
    monkeypatch.setattr(process, "start_time", lambda pid: "later")
    second, resume = attempt("run_dir=runs/${now:%f}")
    assert second != first and resume == "none"
    monkeypatch.setattr(process, "start_time", lambda pid: "still later")
    with pytest.raises(UserError, match="already holds a run"):
        attempt(f"run_dir={first}")


def test_the_first_attempt_refuses_a_folder_that_holds_a_run(attempt, tmp_path):
    (tmp_path / "there").mkdir()
    begin("there", tmp_path)
    with pytest.raises(UserError, match="run_dir=there already holds a run"):
        attempt("run_dir=there")


def test_a_run_from_a_checkpoint_resumes_from_its_own_checkpoints(attempt, tmp_path):
    (tmp_path / "old").mkdir()
    begin("old", tmp_path, checkpoints=1)
    words = ["resume=old/checkpoints/step_000000", "run_dir=new"]
    assert attempt(*words) == ("new", "old/checkpoints/step_000000")
    begin("new", tmp_path)
    assert attempt(*words) == ("new", "old/checkpoints/step_000000")  # the attempt has saved no checkpoint
    begin("new", tmp_path, checkpoints=2)
    assert attempt(*words) == ("new", "latest")
    assert attempt("resume=old/checkpoints/step_000000") == ("old", "old/checkpoints/step_000000")


def test_without_torchrun_nothing_is_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    prepare(["run_dir=there"])
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_no_launch(attempt):
    with pytest.raises(UserError, match="-m starts many runs, and torchrun's ranks share one"):
        attempt("-m", "seed=0,1")
