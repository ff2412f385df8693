"""Finding and reading runs."""

import json

import pytest

from mtrl.config.keys import flat
from mtrl.errors import UserError
from mtrl.figures.groups import find_runs
from mtrl.record.run import Run


def paths_of(paths):
    return [run.path for run in find_runs(paths)]


def test_runs_are_found_up_to_two_levels_down(make_run, tmp_path):
    near, far = make_run("sweep/a"), make_run("study/arm/seed0")
    make_run("deep/1/2/3")
    assert paths_of([tmp_path / "sweep"]) == [near]
    assert paths_of([tmp_path / "study"]) == [far]
    assert paths_of([near]) == [near]
    with pytest.raises(UserError, match="deep holds no run"):
        find_runs([tmp_path / "deep"])


def test_a_run_that_is_named_twice_is_found_once(make_run, tmp_path):
    first, second = make_run("sweep/a"), make_run("sweep/b")
    assert paths_of([second, tmp_path / "sweep", first / ".." / "b"]) == [second, first]


def test_runs_below_a_run_and_in_hidden_folders_are_not_found(make_run, tmp_path):
    outer = make_run("outer")
    make_run("outer/figures/inner")
    make_run(".hidden/run")
    assert paths_of([outer]) == [outer] and paths_of([tmp_path]) == [outer]


def test_an_evaluation_is_not_found_as_a_run(make_run, tmp_path):
    """An evaluation has the layout of a run, and would be drawn as another arm of the study."""
    run, evaluation = make_run("study/run"), make_run("study/evaluation")
    (evaluation / "models.json").write_text("[]")
    assert paths_of([tmp_path / "study"]) == [run]
    with pytest.raises(UserError, match="evaluation holds no run"):
        find_runs([evaluation])


@pytest.mark.parametrize("name", ["missing", "file.jsonl"])
def test_a_path_that_is_no_folder_is_refused_in_one_sentence(tmp_path, name):
    (tmp_path / "file.jsonl").write_text("{}")
    with pytest.raises(UserError, match=f"{name} is no folder; give the folder of a run"):
        find_runs([tmp_path / name])


def test_rows_are_sorted_by_step_and_the_last_row_of_a_step_counts(make_run):
    rows = [{"step": 2, "a": 1.0}, {"step": 1, "a": 5.0}, {"step": 2, "a": 3.0}]
    run = Run(make_run(rows=rows))
    assert run.series("a") == {1: 5.0, 2: 3.0} and run.last_step == 2


def test_a_half_written_row_is_left_out(make_run, capsys):
    folder = make_run(rows=[{"step": 1, "a": 1.0}])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')
    assert Run(folder).series("a") == {1: 1.0}
    assert "metrics.jsonl:2 has no end" in capsys.readouterr().err


def test_null_nan_and_text_are_not_measured(make_run):
    values = [None, float("nan"), float("inf"), "many", True, 0.0, 7]
    run = Run(make_run(rows=[{"step": step, "a": value} for step, value in enumerate(values)]))
    assert run.series("a") == {5: 0.0, 6: 7.0} and run.series("b") == {}


def test_settings_that_an_old_configuration_lacks_have_their_defaults(make_run):
    settings = Run(make_run()).settings
    assert settings["data.validation_rows"] == 0 and settings["environment.name"] == "gsm8k"
    assert settings["name"] == "made_up"


def test_a_run_without_a_configuration_has_the_defaults(make_run):
    folder = make_run()
    (folder / "config.yaml").unlink()
    assert Run(folder).settings["algorithm.group_size"] == 8


def test_a_broken_configuration_is_one_sentence(make_run):
    folder = make_run()
    (folder / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match="config.yaml cannot be read as YAML"):
        _ = Run(folder).settings


def test_spans_without_times_are_left_out(make_run):
    good = {"step": 1, "name": "update", "lane": "trainer", "start": 0.0, "end": 1.0}
    run = Run(make_run(spans=[good, {**good, "end": None}]))
    assert [json.dumps(span) for span in run.spans] == [json.dumps(good)]
    assert Run(make_run("other")).spans == []


def test_flat_writes_dotted_keys():
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f": {}}) == {"a.b": 1, "a.c.d": [2], "e": None}
