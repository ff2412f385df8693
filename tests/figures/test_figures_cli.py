"""The program as a process: its files and its messages."""

import os
import re
import subprocess
import sys

import pytest

from mtrl.errors import UserError
from mtrl.figures.__main__ import chosen, main
from mtrl.figures.axis import Axis
from mtrl.figures.index import FIGURES
from tests import forked
from tests.figures.made import training_rows, trajectory, turn


def run(*words, expected=0):
    command = [sys.executable, "-m", "mtrl.figures", *map(str, words)]
    done = forked.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == expected, done.stderr
    return done


def test_all_figures_of_a_run_are_written_into_its_folder(make_run):
    folder = make_run(trajectories={"train_step_000001": [trajectory([turn(reward=1.0)])]})
    done = run(folder)
    assert done.stdout == f"{len(FIGURES)} figures of 1 run: {folder / 'figures' / 'index.html'}\n"
    assert done.stderr == ""
    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {"index.html", *(f"{name}.png" for name in FIGURES)}
    assert all((folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in FIGURES)


def test_a_sweep_is_grouped_and_two_drawings_are_equal(make_run, tmp_path):
    parts = {"correct": 1.0, "format": 0.5}
    stored = {"train_step_000001": [trajectory([turn(reward=1.0, components=parts, metrics=parts)])]}
    spans = [
        {"step": 1, "name": name, "lane": "trainer", "start": start, "end": start + 1.0}
        for start, name in enumerate(("update", "other", "sync", "another"))
    ]
    for arm in ("grpo", "rloo"):
        for seed in (0, 1):
            settings = {"algorithm.advantage_method": arm}
            make_run(f"sweep/{arm}/{seed}", seed=seed, settings=settings, spans=spans, trajectories=stored)
    words = (tmp_path / "sweep", "--only", "stops,learning,timeline,actions", "--format", "svg", "--x", "tokens")
    done = run(*words, "--out", tmp_path / "first")
    assert done.stdout.startswith("4 figures of 4 runs in 2 groups: ")
    run(*words, "--out", tmp_path / "second")
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert sorted(first) == ["actions.svg", "index.html", "learning.svg", "stops.svg", "timeline.svg"]
    page = first["index.html"].decode()
    assert page.index('src="learning.svg"') < page.index('src="stops.svg"')
    assert "<td>algorithm=grpo</td><td>1</td>" in page
    assert "<td>algorithm.advantage_method</td><td>grpo</td><td>rloo</td>" in page


def test_foreign_text_is_no_markup(make_run, tmp_path, capsys):
    evil = "<script>alert(1)</script>\x1b[2J"
    folder = make_run(settings={"name": evil})
    assert main([str(folder), "--only", "signal", "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "default-src 'none'" in page


def test_links_of_the_page_lead_to_its_files(make_run, tmp_path, capsys):
    out = tmp_path / "out"
    main([str(make_run()), "--only", "signal,budgets", "--out", str(out), "--format", "pdf"])
    links = re.findall(r'(?:href|src)="([^"]+)"', (out / "index.html").read_text())
    assert links and all((out / link).is_file() for link in links)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere is no folder; give the folder of a run, or one that holds runs"),
        (["RUN", "--only", "stop"], "--only stop: stop is no figure; did you mean stops?"),
        (["RUN", "--only", "timeline", "--x", "hours"], "--x hours changes nothing in timeline; leave it out"),
        (["RUN", "OTHER"], "figures of several runs need --out FOLDER"),
        (["EMPTY"], "EMPTY has no row of metrics yet; wait for its first step"),
        (["RUN", "--out", "FILE/below"], "--out FILE/below cannot be made (Not a directory); name another folder"),
    ],
)
def test_a_wrong_command_is_one_sentence(make_run, tmp_path, monkeypatch, capsys, words, sentence):
    make_run("RUN"), make_run("OTHER", seed=1), make_run("EMPTY", rows=[])
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        main(words)
    assert str(error.value) == sentence


def test_a_wrong_command_ends_with_2(tmp_path):
    done = run(tmp_path, expected=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and "holds no run" in done.stderr


def test_a_run_without_rows_is_reported_and_left_out(make_run, tmp_path, capsys):
    make_run("sweep/a"), make_run("sweep/b", seed=1, rows=[])
    assert main([str(tmp_path / "sweep"), "--only", "stops", "--out", str(tmp_path / "out")]) == 0
    assert "sweep/b has no row of metrics yet, and is left out" in capsys.readouterr().err


def test_a_repeated_seed_is_reported(make_run, tmp_path, capsys):
    make_run("sweep/a"), make_run("sweep/b")
    main([str(tmp_path / "sweep"), "--only", "stops", "--out", str(tmp_path / "out")])
    assert "have the same settings and seed" in capsys.readouterr().err


def test_figures_are_chosen_in_the_order_of_display():
    assert chosen(None, Axis.STEPS) == list(FIGURES)
    assert chosen("stops, learning", Axis.HOURS) == ["learning", "stops"]
    with pytest.raises(UserError, match="--only ,: this is no figure"):
        chosen(",", Axis.STEPS)


def test_help_imports_no_heavy_packages():
    code = "import sys, mtrl.figures.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in FIGURES)


def test_a_partial_run_is_drawn_up_to_its_last_step(make_run, tmp_path, capsys):
    whole, part = make_run("sweep/a"), make_run("sweep/b", seed=1, rows=training_rows(2))
    with (part / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout/re')
    main([str(whole.parent), "--only", "learning", "--out", str(tmp_path / "out")])
    assert "<td>2 of 4</td>" in (tmp_path / "out" / "index.html").read_text()


def test_the_table_is_printed_written_and_shown(make_run, tmp_path, capsys):
    out = tmp_path / "out"
    main([str(make_run()), "--only", "stops", "--table", "--out", str(out)])
    line = "| made_up | 1 | 4 | 0.200 | 0.200 | – | – |"
    assert line in capsys.readouterr().out and line in (out / "table.md").read_text()
    assert "made\\_up & 1 & 4" in (out / "table.tex").read_text()
    assert "<td>made_up</td><td>1</td><td>4</td><td>0.200</td>" in (out / "index.html").read_text()
