"""A user's SOP-Bench folder: it is used for evaluation only, and its code runs in its own process."""

import json
import logging
import os
import random
import sys
from pathlib import Path

import pytest

from envs.sop import FAMILY
from envs.sop.sop_bench import load_sop_bench, mismatches
from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from tests import forked

ROOT = Path(__file__).parents[3]
RIGHT = '<final_output>{"state": "open", "keys": 2}</final_output>'


@pytest.fixture
def rows(folder):
    return load_sop_bench(folder)


def test_rows_are_complete_and_held_out(rows):
    assert json.loads(json.dumps(rows)) == rows
    assert [row["id"] for row in rows] == ["doors-0", "doors-1"]
    assert all(row["split"] == "test" for row in rows)
    assert rows[0]["ground_truth"] == {"state": "Open", "keys": "2"}


def test_the_prompt_requires_exactly_the_output_columns(rows):
    """The folder's own text requires <final_response>, and its example lacks a field."""
    system, user = rows[0]["prompt"]
    assert '<final_output>{"state": "…", "keys": "…"}</final_output>' in system["content"]
    assert system["content"].index("<final_response>") < system["content"].index("<final_output>")
    assert user["content"] == "door_id: D1\nfloor: 2\nkey_ring: ['a', 'b']"
    assert "Open" not in user["content"]


def test_mismatches_between_text_and_data_are_logged(folder, caplog):
    with caplog.at_level(logging.WARNING):
        load_sop_bench(folder)
    assert "sop.txt asks for <final_response>; the prompt asks for <final_output>" in caplog.text
    assert "sop.txt never names the output keys" in caplog.text
    assert "tool askPorter has no results at all" in caplog.text
    assert mismatches("<final_output> with state", ["state"]) == []


def test_an_episode_replays_the_folder_s_own_tools(rows, play, score):
    calls = [
        format_call("lookAtDoor", {"door_id": "D1", "floor": 2}),
        format_call("lookAtDoor", {"door_id": "D1"})
        + format_call("countKeys", {"door_id": "D1", "key_ring": ["a", "b"]}),
    ]
    first, second, last = play(rows[0], [*calls, RIGHT])
    assert json.loads(first.observation[0]["content"]).items() >= {"state": "Open", "floor": 2}.items()
    assert json.loads(second.observation[0]["content"])["floor"] is None
    assert second.observation[1]["content"] == "2"
    assert last.reward == 1.0 == score([*calls, RIGHT], rows[0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("lookAtDoor", {"door_id": "D2"}), ("askPorter", {"question": "which?"}), ("lookAtDoor", {})],
)
def test_other_calls_have_no_result_and_reveal_nothing(name, arguments, rows, play):
    (result,) = play(rows[0], [format_call(name, arguments)])
    (message,) = result.observation
    assert message["content"].startswith("Error: ") and "Open" not in message["content"]


def test_tools_that_draw_at_random_answer_the_same_in_every_run(folder, rows):
    assert load_sop_bench(folder) == rows
    assert any("noise" in str(line["result"]) for line in rows[0]["fixture"])


def test_tools_that_print_exit_or_return_sets_spoil_no_result(folder):
    code = (folder / "tools.py").read_text()
    code = code.replace(
        "random.random()", "(os.system('echo a program'), os.write(1, b'x'), set('abcdefghijklmnop'))[2]"
    )
    (folder / "tools.py").write_text(
        code.replace("return int(", "return sys.exit(").replace("import csv", "import csv, sys")
    )
    rows = load_sop_bench(folder)
    looks = [line["result"] for line in rows[0]["fixture"]]
    assert looks and all(len(look["noise"]) == len(str(set("abcdefghijklmnop"))) for look in looks)
    assert load_sop_bench(folder) == rows, "the order of a set differs between processes with other hash seeds"


def test_values_outside_of_json_become_null(folder):
    specs = json.loads((folder / "toolspecs.json").read_text())
    specs[1]["toolSpec"]["inputSchema"]["json"]["properties"]["key_ring"]["type"] = "string"
    (folder / "toolspecs.json").write_text(json.dumps(specs))
    results = [line["result"] for line in load_sop_bench(folder)[0]["fixture"] if line["tool"] == "countKeys"]
    assert results == [None]


def test_the_folder_s_code_runs_in_a_process_without_variables(folder, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    spy = "import os, sys\nopen(os.path.join(os.path.dirname(__file__), 'seen'), 'w').write(repr(dict(os.environ)))\n"
    (folder / "tools.py").write_text(spy + (folder / "tools.py").read_text())
    before = set(sys.modules)
    load_sop_bench(folder)
    assert "hush" not in (folder / "seen").read_text() and "PATH" in (folder / "seen").read_text()
    assert not {name for name in set(sys.modules) - before if "tools_of_folder" in name}
    assert not (folder / "__pycache__").exists()


def test_training_on_the_folder_is_refused_in_one_sentence(folder):
    with pytest.raises(
        UserError, match=r"data.path=.* would be trained on; .*CC-BY-NC-4.0.* allows evaluation only"
    ) as e:
        FAMILY.load(DataConfig(path=str(folder)), 0)
    assert "\n" not in str(e.value) and "environment.config.sop_bench" in str(e.value)


def test_a_run_trains_on_generated_rows_and_holds_the_folder_s_out(folder):
    splits = FAMILY.load(DataConfig(synthetic_train_rows=30), 0, sop_bench=str(folder))
    assert [row["id"] for row in splits.test] == ["doors-0", "doors-1"]
    assert len(splits.train) == 30 and {row["split"] for row in splits.train} == {"train"}
    assert "door" not in json.dumps(splits.train)


def test_an_evaluation_alone_has_no_training_rows(folder):
    splits = FAMILY.load(DataConfig(synthetic_train_rows=0), 0, sop_bench=str(folder))
    assert splits.train == [] and len(splits.test) == 2


def test_a_folder_has_no_demonstrations(rows):
    with pytest.raises(ValueError, match="row doors-0 is held out"):
        FAMILY.demonstrate(rows[0], random.Random(0))


def test_the_labels_fit_prompt_and_scorer(rows, play, score):
    for row in rows:
        responses = FAMILY.gold(row)
        assert len(responses) == 2 and play(row, responses)[-1].reward == 1.0 == score(responses, row)


@pytest.mark.slow
def test_a_run_without_steps_is_an_evaluation(folder, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "mtrl.main", "experiment=sop", "debug=fast", "trainer.max_steps=0"]
    command += [f"environment.config.sop_bench={folder}", f"run_dir={run}"]
    done = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "preflight: gold failed" not in done.stdout + done.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == 0
    lines = (run / "trajectories" / "eval_greedy_step_000000.jsonl").read_text().splitlines()
    assert [json.loads(line)["task_id"] for line in lines] == ["doors-0", "doors-1"]


def edit(name, old, new):
    def change(folder):
        file = folder / name
        file.write_text(file.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: os.remove(folder / "sop.txt"), "sop.txt does not exist"),
        (lambda folder: os.remove(folder / "metadata.json"), "metadata.json does not exist"),
        (lambda folder: os.remove(folder / "tools.py"), "tools.py does not exist"),
        (lambda folder: os.remove(folder / "toolspecs.json"), "toolspecs.json does not exist"),
        (lambda folder: os.remove(folder / "test_set_without_outputs.csv"), "without_outputs.csv does not exist"),
        (edit("metadata.json", '"output_columns"', '"outputs"'), "must hold input_columns and output_columns"),
        (edit("metadata.json", '["state", "keys"]', '["state", "floor"]'), "names floor as input and as output"),
        (edit("metadata.json", '"keys"]', '"locks"]'), "has no column locks, which metadata.json names"),
        (edit("metadata.json", "{", "[["), "is not JSON"),
        (edit("test_set_without_outputs.csv", "D2", "D3"), "has other rows than test_set_with_outputs.csv"),
        (edit("toolspecs.json", '"name"', '"nome"'), "holds a tool without a name or a request schema"),
        (edit("tools.py", "import csv", "import no_such_module, csv"), "cannot be run .*no_such_module.*install what"),
        (edit("tools.py", "DoorManager", "Door"), "no class whose name ends in Manager"),
        (edit("tools.py", "return getattr(self, name)", "raise KeyError"), "answered none of 6 calls .*KeyError"),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_sentence(change, sentence, folder):
    change(folder)
    with pytest.raises(UserError, match=sentence) as error:
        load_sop_bench(folder)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is no folder; give the folder of one SOP-Bench domain"):
        load_sop_bench(tmp_path / "nowhere")
