"""Runs and their files are found, indexed in the background, followed while they grow, and shown if damaged."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.record import index as store
from mtrl.record.index import Indexer, StoredFile, TrajectoryFolder, index_file
from mtrl.record.library import Library, names_of
from mtrl.record.metrics import unfinished
from mtrl.record.records import Records, has_step
from mtrl.record.trajectories import index_path, read_index, write_groups
from mtrl.types import Group, to_json
from mtrl.view import differences
from mtrl.view.series import thin
from tests.view.made_runs import make_run, make_trajectory


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(store, "PAUSE", 0.0)
    monkeypatch.setattr(store, "SHARE", 1e9)


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def write(run, kind="train", step=1, count=3, start=0):
    made = [make_trajectory(index=start + n) for n in range(count)]
    return write_groups(run / "trajectories", kind, step, [Group("g", {}, made)])


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "trajectories").mkdir(parents=True)
    return tmp_path / "run"


def test_stored_indexes_are_read_and_not_rebuilt(run, monkeypatch):
    write(run, count=5)
    monkeypatch.setattr(store, "scan", lambda *_: pytest.fail("the index was there"))
    rows = TrajectoryFolder(run, Indexer()).rows()
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]


def test_missing_indexes_are_built_and_stored(run):
    path = write(run)
    before = read_index(path)
    index_path(path).unlink()
    folder = TrajectoryFolder(run, Indexer())
    until(lambda: len(folder.rows()) == 3)
    until(lambda: read_index(path) == before)


def test_a_folder_that_cannot_be_written_is_indexed_in_memory(run, monkeypatch):
    path = write(run)
    index_path(path).unlink()

    def refuse(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr(store, "write_index", refuse)
    folder = TrajectoryFolder(run, Indexer())
    until(lambda: len(folder.rows()) == 3)
    assert not index_path(path).exists() and folder.files[0].problem is None


def test_newest_file_first(run):
    for kind, step in (("train", 2), ("train", 10), ("eval_greedy", 10), ("train", 1)):
        write(run, kind, step, count=1)
    (run / "trajectories" / "base_greedy.jsonl").write_text(to_json(make_trajectory()) + "\n")
    folder = TrajectoryFolder(run, Indexer())
    until(lambda: len(folder.rows()) == 5)
    assert [file.name for file in folder.files] == [
        "eval_greedy_step_000010", "train_step_000010", "train_step_000002", "train_step_000001", "base_greedy"
    ]  # fmt: skip
    assert [row.file.name for row in folder.rows()] == [file.name for file in folder.files]


def test_an_appended_file_is_read_from_its_former_end(run, monkeypatch):
    path = run / "trajectories" / "label_greedy.jsonl"
    lines = [to_json(make_trajectory(index=n)).encode() + b"\n" for n in range(40)]
    path.write_bytes(b"".join(lines[:30]))
    folder = TrajectoryFolder(run, Indexer())
    until(lambda: len(folder.rows()) == 30)
    until(lambda: folder.files[0].indexed and read_index(path) is not None)
    starts = []
    scan = store.scan
    monkeypatch.setattr(store, "scan", lambda path, offset: starts.append(offset) or scan(path, offset))
    for number in range(30, 40):
        with path.open("ab") as file:
            file.write(lines[number][:20])
        folder.rows()
        with path.open("ab") as file:
            file.write(lines[number][20:])
        until(lambda number=number: len(folder.rows()) == number + 1)
    assert [row.line.place for row in folder.rows()] == list(range(40))
    assert min(starts) == sum(map(len, lines[:30]))


def test_a_rewritten_file_is_read_again(run):
    write(run, count=3)
    folder = TrajectoryFolder(run, Indexer())
    until(lambda: len(folder.rows()) == 3)
    write(run, count=2, start=7)
    until(lambda: [row.line.place for row in folder.rows()] == [7, 8])
    (run / "trajectories" / "train_step_000001.jsonl").unlink()
    until(lambda: folder.rows() == [])


def test_an_index_of_a_part_of_a_file_is_continued(run):
    path = write(run, count=3)
    half = read_index(path)
    with path.open("ab") as file:
        file.write(to_json(make_trajectory(index=3)).encode() + b"\n")
    file = StoredFile(path)
    index_file(file)
    assert file.lines[:3] == half.lines and len(file.lines) == 4
    assert read_index(path) == file.index


def test_broken_files_are_listed_with_their_problem(run, monkeypatch):
    folder = run / "trajectories"
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 10)
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "a_folder.jsonl").mkdir()
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    write(run, "train", 1, count=1)
    write(run, "train", 2, count=1)
    real = store.scan

    def scan(path, offset=0):
        if "000001" in path.name:
            raise PermissionError(13, "Permission denied")
        return real(path, offset)

    index_path(folder / "train_step_000001.jsonl").unlink()
    monkeypatch.setattr(store, "scan", scan)
    found = TrajectoryFolder(run, Indexer())
    found.rows()
    until(lambda: len(found.files) == 4 and all(file.indexed for file in found.files))
    by_name = {file.name: file for file in found.files}
    assert set(by_name) == {"binary", "empty", "train_step_000001", "train_step_000002"}
    assert by_name["train_step_000001"].problem == "cannot be read (Permission denied)"
    assert all(line.problem for line in by_name["binary"].lines)
    assert (by_name["empty"].problem, by_name["empty"].lines) == (None, [])
    assert len(by_name["train_step_000002"].lines) == 1


def test_files_outside_of_the_run_are_not_read(run, tmp_path):
    secret = tmp_path / "secret.jsonl"
    secret.write_text(to_json(make_trajectory()) + "\n")
    (run / "trajectories" / "link.jsonl").symlink_to(secret)
    inside = write(run)
    (run / "trajectories" / "same.jsonl").symlink_to(inside)
    folder = TrajectoryFolder(run, Indexer())
    folder.rows()
    assert {file.name for file in folder.files} == {"train_step_000001", "same"}
    assert folder.foreign == ["trajectories/link.jsonl"]


def test_a_folder_of_trajectories_outside_of_the_run_is_not_read(run, tmp_path):
    write(run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("")
    (other / "trajectories").symlink_to(run / "trajectories")
    (shown,) = Library([other]).runs
    assert shown.index.rows() == []
    assert shown.problems() == ["trajectories leads out of the run and is not read"]


def test_a_file_that_is_replaced_during_the_read_is_read_again(run, monkeypatch):
    """Lines of the old file must not be stored with the time of the new file."""
    path = write(run)
    index_path(path).unlink()
    other = run / "other.jsonl"
    other.write_bytes(path.read_bytes().replace(b'"t"', b'"u"'))
    read_all = store.scan

    def scan(*words):
        yield from read_all(*words)
        if other.is_file():
            other.replace(path)

    monkeypatch.setattr(store, "scan", scan)
    file = store.StoredFile(path)
    store.index_file(file)
    assert "replaced while it was read" in file.problem and file.lines == [] and read_index(path) is None
    store.index_file(file)
    assert file.problem is None and {line.task_id for line in file.lines} == {"u"}


# Runs


def test_runs_are_found_below_a_folder_also_sweeps(tmp_path):
    for name in ("gsm8k/monday", "gsm8k/sweep/0", "gsm8k/sweep/1", "deep/er/than/that"):
        make_run(tmp_path / name, steps=1, groups=1, size=1)
    (tmp_path / "gsm8k" / "monday" / "export").mkdir()
    found = {str(run.path.relative_to(tmp_path)) for run in Library([tmp_path]).runs}
    assert found == {"gsm8k/monday", "gsm8k/sweep/0", "gsm8k/sweep/1"}


def test_runs_have_relative_paths_and_new_runs_are_in_order(tmp_path, monkeypatch):
    for name in ("outputs/a", "outputs/c"):
        make_run(tmp_path / name, steps=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Library, "LOOK_EVERY", 0.0)
    library = Library([tmp_path / "outputs"])
    make_run(tmp_path / "outputs/b", steps=1)
    assert [run.place for run in library.runs] == ["outputs/a", "outputs/b", "outputs/c"]
    monkeypatch.chdir(tmp_path / "outputs" / "a")
    assert [len(Path(run.place).parts) for run in library.runs] == [3, 3, 3], "not the whole path of the machine"


def test_a_run_that_is_named_twice_is_shown_once(tmp_path):
    run = make_run(tmp_path / "one", steps=1)
    assert [r.id for r in Library([run, tmp_path]).runs] == ["one"]


def test_new_runs_appear(tmp_path, monkeypatch):
    monkeypatch.setattr(Library, "LOOK_EVERY", 0.0)
    make_run(tmp_path / "one", steps=1)
    library = Library([tmp_path])
    make_run(tmp_path / "two", steps=1)
    assert [run.id for run in library.runs] == ["one", "two"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: None, "does not exist; give the folder of a run"),
        (lambda p: p.write_text(""), "is no folder"),
        (lambda p: p.mkdir(), "holds no run"),
    ],
)
def test_paths_that_hold_no_run(tmp_path, make, sentence):
    make(tmp_path / "x")
    with pytest.raises(UserError, match=sentence):
        Library([tmp_path / "x"])


def test_ids_are_as_short_as_they_can_be():
    paths = [Path("/a/games/0"), Path("/a/gsm8k/0"), Path("/a/gsm8k/1"), Path("/a/b.c/x"), Path("/a/b/c.x")]
    assert list(names_of(paths).values()) == ["games.0", "gsm8k.0", "1", "x", "c.x"]
    same = [Path("/a/b.c"), Path("/a.b/c"), Path("/a.b.c")]
    assert len(set(names_of(same).values())) == 3


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(["a", "b", "a.b", "c"]), min_size=1, max_size=3), unique_by=tuple))
def test_ids_are_unique(parts):
    paths = [Path("/", *names) for names in parts]
    assert len(set(names_of(paths).values())) == len(paths)


def status_of(run, **ages):
    now = time.time()
    for name, age in ages.items():
        for path in [*run.glob(f"{name}*"), *(run / "trajectories").glob(f"{name}*")]:
            os.utime(path, (now - age, now - age))
    return Library([run]).runs[0].status


def test_the_status_of_a_run(tmp_path):
    run = make_run(tmp_path / "one", steps=2)
    old = {"metrics": 5000, "train": 5000, "eval": 5000, "config": 5000, "summary": 5000, "status": 5000}
    (run / "status.txt").write_text("running\n")
    assert status_of(run) == "running"
    assert status_of(run, **old) == "stopped"  # killed
    (run / "summary.json").write_text(json.dumps({"steps": 1}))
    (run / "status.txt").write_text("stopped\n")
    assert status_of(run) == "stopped"  # Ctrl-C, just now
    (run / "summary.json").write_text(json.dumps({"steps": 2}))
    (run / "status.txt").write_text("running\n")
    assert status_of(run, summary=5000, metrics=10) == "running"  # resumed
    (run / "summary.json").write_text("{half")
    assert Library([run]).runs[0].problems() == ["summary.json is not JSON"]


def test_a_copy_of_a_finished_run_is_finished(tmp_path):
    """All files of a copy are new, and the summary may be older than the metrics."""
    run = make_run(tmp_path / "one", steps=2)
    (run / "summary.json").write_text(json.dumps({"steps": 2}))
    for status in ("finished\n", None):  # an earlier version of mtrl wrote no status
        (run / "status.txt").write_text(status) if status else (run / "status.txt").unlink()
        assert status_of(run, summary=2, metrics=0) == "finished"
        assert status_of(run, summary=0, metrics=2) == "finished"


def test_an_evaluation_that_has_its_report_is_finished(tmp_path):
    run = make_run(tmp_path / "one", steps=1)
    assert status_of(run, metrics=3000, train=3000, eval=3000, config=9000) == "stopped"
    (run / "report.json").write_text("{}")
    assert Library([run]).runs[0].status == "finished"


def test_a_run_with_slow_steps_is_not_stopped(tmp_path):
    run = make_run(tmp_path / "one", steps=2)
    (run / "metrics.jsonl").write_text('{"step": 1, "time/step": 600}\n')
    assert status_of(run, metrics=3000, train=3000, eval=3000, config=9000) == "running"


def test_differences_and_seeds():
    one = {"seed": 0, "loss": "ppo", "run_dir": "a"}
    other = {"seed": 1, "loss": "ppo", "run_dir": "b", "new.key": 3}
    third = {"seed": 0, "loss": "cispo", "run_dir": "c"}
    keys = differences.differing([one, other, third])
    assert keys == ["loss", "seed"]  # a key of only one run is no difference, and neither is the folder
    assert differences.families([("n", one), ("n", other), ("n", third)], keys) == ["n · loss=ppo"] * 2 + [
        "n · loss=cispo"
    ]
    assert differences.differing([]) == [] and differences.differing([one]) == []


def test_families_with_equal_labels_get_numbers():
    configs = [{**{f"k{n}": 0 for n in range(6)}, "k5": value} for value in (1, 2)]
    configs = [*configs, {f"k{n}": 1 for n in range(6)}]
    keys = differences.differing(configs)
    labels = differences.families([("n", config) for config in configs], keys)
    assert len(set(labels)) == 3


# Records and curves


def test_records_follow_a_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = Records(path, has_step)
    assert (records.refresh(), records.state) == ([], "")
    path.write_text('{"step": 1}\n{"step": 2')
    assert records.refresh() == [{"step": 1}]
    assert records.problems == [unfinished("metrics.jsonl", 2)]
    with path.open("a") as file:
        file.write('}\nnot json\n[]\n{"step": true}\n{"step": 3}\n')
    assert [row["step"] for row in records.refresh()] == [1, 2, 3]
    assert records.problems == ["metrics.jsonl: 3 lines cannot be read (3, 4, 5)"]


def test_records_of_a_resumed_run_are_read_again(tmp_path):
    """A resumed run truncates the file and continues it, so that it may soon be longer than before."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "value": 1}}\n' for n in range(10)))
    records = Records(path, has_step)
    assert len(records.refresh()) == 10
    path.write_text("".join(f'{{"step": {n}, "value": {1 if n < 5 else 2}}}\n' for n in range(20)))
    assert [row["value"] for row in records.refresh()] == [1] * 5 + [2] * 15


point = st.tuples(st.integers(0, 10**6), st.none() | st.floats(-10, 10))


@settings(deadline=None)
@given(st.lists(point, max_size=300), st.integers(2, 60))
def test_thinning_retains_the_extremes(points, most):
    points = sorted(points, key=lambda p: p[0])
    thinned = thin(points, most)
    assert len(thinned) <= most
    assert thinned == points or len(points) > most
    remaining = iter(points)
    assert all(any(point == other for other in remaining) for point in thinned)  # in order, without invented values
    numbers = [value for _, value in points if value is not None]
    if numbers:
        shown = [value for _, value in thinned if value is not None]
        assert (min(shown), max(shown)) == (min(numbers), max(numbers))
