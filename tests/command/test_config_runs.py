"""The folder to which a run writes, and the run that it continues."""

import os
import re

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose, merge
from mtrl.command.runs import claim, settle
from mtrl.errors import UserError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_run(path, written: float = 0.0):
    (path / "checkpoints" / "step_20").mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    os.utime(path / "metrics.jsonl", (written, written))
    return path


def test_a_new_run_has_a_folder_of_its_own():
    assert re.fullmatch(r"outputs/gsm8k/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", compose().run_dir)
    assert compose(["name=mine"]).run_dir.startswith("outputs/mine/")
    assert compose(["run_dir=there"]).run_dir == "there"


def test_an_empty_folder_name_is_refused():
    with pytest.raises(UserError, match="run_dir= names no folder; write run_dir=FOLDER, or leave it out for a new"):
        compose(["run_dir="])


def test_composing_makes_no_folder(here):
    compose()
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml", "summary.json"])
def test_a_folder_that_holds_a_run_is_refused(here, file):
    (here / "there").mkdir()
    compose(["run_dir=there"])  # an empty folder is fine
    (here / "there" / file).touch()
    with pytest.raises(UserError) as caught:
        compose(["run_dir=there"])
    assert str(caught.value) == (
        "run_dir=there already holds a run; continue it with resume=latest, or name another folder"
    )


def test_a_folder_whose_run_recorded_nothing_may_be_named_again(here):
    (here / "there" / "trajectories").mkdir(parents=True)
    for file in ("config.yaml", "run.log"):
        (here / "there" / file).touch()
    assert compose(["run_dir=there"]).run_dir == "there"
    (here / "there" / "trajectories" / "eval_0.jsonl").touch()
    with pytest.raises(UserError, match="run_dir=there already holds a run"):
        compose(["run_dir=there"])


def test_latest_is_the_run_of_that_name_that_wrote_last(here):
    make_run(here / "outputs/gsm8k/a", written=2000)
    make_run(here / "outputs/gsm8k/b", written=1000)
    make_run(here / "outputs/other/c", written=3000)
    (here / "outputs/gsm8k/empty").mkdir()
    cfg = compose(["resume=latest"])
    assert (cfg.run_dir, cfg.resume) == ("outputs/gsm8k/a", "latest")


def test_latest_without_a_run():
    with pytest.raises(UserError) as caught:
        compose(["resume=latest", "name=mine"])
    assert str(caught.value) == (
        "resume=latest: there is no run in outputs/mine; start one with resume=none, or set run_dir"
    )


def test_latest_in_a_named_folder_continues_or_starts(here):
    assert compose(["run_dir=there", "resume=latest"]).resume == "none"
    make_run(here / "there")
    assert compose(["run_dir=there", "resume=latest"]).resume == "latest"


@pytest.mark.parametrize("path", ["outputs/x/run", "outputs/x/run/checkpoints/step_20"])
def test_a_path_continues_the_run_that_owns_it(here, path):
    make_run(here / "outputs/x/run")
    cfg = compose([f"resume={path}"])
    assert (cfg.run_dir, cfg.resume) == ("outputs/x/run", path)


def test_a_path_with_a_folder_starts_a_run_from_there(here):
    make_run(here / "old")
    assert compose(["resume=old/checkpoints/step_20", "run_dir=new"]).run_dir == "new"
    assert compose(["resume=old/checkpoints/step_20", "run_dir=old"]).run_dir == "old"
    make_run(here / "another")
    with pytest.raises(UserError, match="run_dir=another already holds a run"):
        compose(["resume=old", "run_dir=another"])


def test_a_run_resumes_with_its_own_task_only(here):
    make_run(here / "there")
    OmegaConf.save(compose(["experiment=text_to_sql", "run_dir=other"]), here / "there/config.yaml")
    compose(["experiment=text_to_sql", "run_dir=there", "resume=latest"])
    with pytest.raises(UserError) as caught:
        compose(["run_dir=there", "resume=latest"])
    assert str(caught.value) == (
        "resume=latest: the run in there has environment.name=text_to_sql, and this command has gsm8k; "
        "repeat the choices of its first command, such as experiment=text_to_sql"
    )


@pytest.mark.parametrize("resumed", [["run_dir=there", "resume=latest"], ["run_dir=new", "resume=there"]])
def test_a_run_resumes_with_its_own_adapters_only(here, resumed):
    """Adapters with another alpha have the same shapes, and would be another model."""
    make_run(here / "there")
    OmegaConf.save(compose(["model.lora_rank=8", "model.lora_alpha=16", "run_dir=other"]), here / "there/config.yaml")
    compose(["model.lora_rank=8", "model.lora_alpha=16", *resumed])
    for key, was, words in [
        ("model.lora_rank", 8, ["model.lora_rank=0"]),
        ("model.lora_rank", 8, ["model.lora_rank=4", "model.lora_alpha=8"]),
        ("model.lora_alpha", 16, ["model.lora_rank=8", "model.lora_alpha=32"]),
    ]:
        now = dict(word.split("=") for word in words)[key]
        with pytest.raises(UserError) as caught:
            compose([*words, *resumed])
        assert str(caught.value) == (
            f"{resumed[1]}: the run in there has {key}={was}, and this command has {now}; repeat {key}={was}, or "
            "start a new run"
        )


def test_a_path_that_is_no_checkpoint(here):
    with pytest.raises(UserError, match="resume=nowhere does not exist; write none, latest, a run folder or"):
        compose(["resume=nowhere"])
    (here / "rows.jsonl").touch()
    with pytest.raises(UserError, match="resume=rows.jsonl is a file, and no run or checkpoint; write none, latest, a"):
        compose(["resume=rows.jsonl"])
    (here / "folder").mkdir()
    with pytest.raises(UserError, match="resume=folder is neither a run nor a checkpoint"):
        compose(["resume=folder"])
    (make_run(here / "outputs/gsm8k/monday") / "config.yaml").touch()
    for folder in ("outputs", "outputs/gsm8k"):
        with pytest.raises(UserError, match="or a run folder, such as outputs/gsm8k/monday$"):
            compose([f"resume={folder}"])


def test_latest_warns_about_a_run_without_a_checkpoint(here):
    """The newest run may have failed at its start, and may not be the intended one."""
    (make_run(here / "outputs/gsm8k/failed") / "checkpoints" / "step_20").rmdir()
    cfg = merge(["resume=latest"])
    [warning] = settle(cfg)
    assert warning.startswith("resume=latest: outputs/gsm8k/failed has no checkpoint yet, so it begins anew")
    (here / "outputs/gsm8k/failed/checkpoints/step_000001").mkdir(parents=True)
    assert settle(merge(["resume=latest"])) == []


def test_two_runs_of_the_same_second_keep_their_own_folders(here):
    assert [claim("outputs/x/now") for _ in range(3)] == ["outputs/x/now", "outputs/x/now_2", "outputs/x/now_3"]
    assert sorted(path.name for path in (here / "outputs/x").iterdir()) == ["now", "now_2", "now_3"]
