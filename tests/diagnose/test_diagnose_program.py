"""The command: its output, its files, its exit status, and hostile runs."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ill_runs import RUNS, hacked
from made_up_runs import configured, learning, rows
from omegaconf import OmegaConf

import mtrl
from mtrl.diagnose.__main__ import main
from mtrl.diagnose.finding import Finding
from mtrl.errors import UserError
from mtrl.types import FinishReason, StopReason, Trajectory, Turn, write_jsonl
from tests import forked

EVIL = "\x1b]0;owned\x07<script>alert(1)</script>\u202e[bold]x[/bold] the end"


def write(folder, config, made):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def rows_of(record):
    made = {}
    for key in record.metrics():
        series = record.series(key)
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            made.setdefault(step, {"step": step})[key] = value
    return [made[step] for step in sorted(made)]


def trajectory(reward, score, text, index=0):
    turn = Turn(
        [1], [2], [-0.1], [(0, 1)], FinishReason.STOP, text, {"role": "assistant", "content": text}, reward=reward
    )
    return Trajectory("task", "step1/0", index, [turn], StopReason.DONE, score=score)


@pytest.fixture
def healthy(tmp_path):
    return write(tmp_path / "healthy", configured(trainer__max_steps=80), rows(0, learning(0.2, 0.95, 80)))


@pytest.fixture
def ill(tmp_path):
    run = hacked(reward__scheme="guide")
    folder = write(tmp_path / "ill", run.config, rows_of(run))
    (folder / "trajectories").mkdir()
    stored = [trajectory(1.0, 0.0, f"{n} {EVIL}", n) for n in range(4)] + [trajectory(1.5, 0.0, "highest reward", 4)]
    stored += [trajectory(0.0, 0.0, "honest", 5), trajectory(1.0, 1.0, "right", 6)]
    write_jsonl(folder / "trajectories" / "train_step_000030.jsonl", stored)
    return folder


def test_a_healthy_run(healthy, capsys):
    assert main([str(healthy)]) == 0
    output = capsys.readouterr().out
    assert "healthy" in output and "alarm" not in output.lower().replace("no alarm", "").replace("is an alarm", "")


def test_a_faulty_run_is_reported(ill, capsys):
    assert main([str(ill)]) == 1
    output = capsys.readouterr().out
    assert "ALARM" in output and "hacked_reward" in output and "R150" in output
    assert "trajectories/train_step_000030.jsonl:5" in output, "the highest reward"
    assert output.index("jsonl:5") < output.index("jsonl:1")
    assert f"mtrl view {ill}" in output and f"mtrl rescore {ill}" in output
    assert f"parent={ill}" in output


def test_hostile_responses_stay_text(ill, capsys, tmp_path):
    page = tmp_path / "page.html"
    main([str(ill), "--html", str(page)])
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\x07" not in output and "\u202e" not in output
    html = page.read_text()
    tags = Tags()
    tags.feed(html)
    assert "script" not in tags.seen and {"svg", "section", "code"} <= tags.seen
    assert "&lt;script&gt;" in html and "default-src 'none'" in html
    assert not tags.loaded, "nothing is loaded from elsewhere"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen, self.loaded = set(), []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        self.loaded += [
            v for k, v in attributes if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]


def test_json_contains_the_whole_report(ill, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert main([str(ill), "--json", str(path)]) == 1
    held = json.loads(path.read_text())
    assert held["status"] == "alarm" and held["run"] == str(ill)
    first = Finding.from_dict(held["findings"][0])
    assert first.rule == "hacked_reward" and first.witnesses[0].where == "trajectories/train_step_000030.jsonl:5"
    assert len(held["checked"]) + len(held["too_early"]) + len(held["broken"]) == len(RUNS)
    capsys.readouterr()
    main([str(ill), "--json", "-"])
    assert json.loads(capsys.readouterr().out) == held


def test_a_wrong_claim_threshold_is_not_reported_as_a_hacked_reward(tmp_path, capsys):
    """Partial credit reaches 1.0, and every success earns 2 and more: the threshold is wrong, not the reward."""
    run = hacked()
    folder = write(tmp_path / "misfit", run.config, rows_of(run))
    (folder / "trajectories").mkdir()
    stored = [trajectory(1.2, 0.0, "half", n) for n in range(20)] + [trajectory(2.5, 1.0, "whole", n) for n in range(6)]
    write_jsonl(folder / "trajectories" / "train_step_000030.jsonl", stored)
    assert main([str(folder)]) == 0
    assert "evaluation.claim_threshold=2.5" in capsys.readouterr().out


def test_a_running_run_is_diagnosed(healthy, capsys):
    lines = (healthy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (healthy / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:40])
    assert main([str(healthy)]) == 0
    assert "too early to tell" in capsys.readouterr().out


def test_a_run_without_a_single_step(tmp_path, capsys):
    assert main([str(write(tmp_path / "new", configured(), []))]) == 0
    assert "too early to tell" in capsys.readouterr().out


def test_an_evaluation_is_refused(healthy):
    (healthy / "models.json").write_text("[]")
    with pytest.raises(UserError, match=f"{healthy} is an evaluation, and {healthy}/report.html describes it; give"):
        main([str(healthy)])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="has no config.yaml"):
        main([str(tmp_path)])
    run = write(tmp_path / "run", configured(), [])
    with pytest.raises(UserError, match="is no folder"):
        main([str(run), "--html", str(tmp_path / "no" / "page.html")])
    (run / "config.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="no configuration"):
        main([str(run)])


@pytest.mark.parametrize(("words", "status"), [(["ill"], 1), (["healthy"], 0), (["nowhere"], 2), ([], 2)])
def test_exit_status(words, status, ill, healthy, tmp_path):
    root = Path(mtrl.__file__).parent.parent
    command = [sys.executable, "-m", "mtrl.diagnose", *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_no_heavy_packages():
    """The help imports neither torch nor matplotlib."""
    code = (
        "import sys\nfrom mtrl.diagnose import __main__, live\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["collapse", "token_cap", "memory_growth"])
def test_every_kind_of_finding_is_drawn(name, tmp_path, capsys):
    run = RUNS[name]()
    folder = write(tmp_path / name, run.config, rows_of(run))
    main([str(folder), "--html", str(tmp_path / "page.html")])
    html = (tmp_path / "page.html").read_text()
    assert html.count("<svg") >= 1 and name in html and str(np.pi) not in html
