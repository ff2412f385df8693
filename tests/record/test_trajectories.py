"""Files of trajectories and their indexes."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.record import trajectories
from mtrl.record.trajectories import (
    LineSummary,
    TrajectoryIndex,
    continues,
    index_path,
    is_fresh,
    kind_and_step,
    read_index,
    scan,
    stamp_of,
    summarise,
    summarise_line,
    whole_lines,
    write_groups,
    write_index,
)
from mtrl.types import Group, StopReason, read_trajectories, to_json
from tests.view.made_runs import HOSTILE, make_trajectory, make_turn


def groups(*made):
    return [Group(t.group_id, {}, [t]) for t in made]


def test_written_trajectories_are_read_back(tmp_path):
    made = [make_trajectory(index=n, rewards=(0.1, 0.2 * n)) for n in range(4)]
    made[1].turns[0].text = HOSTILE
    path = write_groups(tmp_path, "train", 7, [Group("g", {}, made[:2]), Group("h", {}, made[2:])])
    assert path.name == "train_step_000007.jsonl"
    assert list(read_trajectories(path)) == made
    assert path.read_bytes() == "".join(to_json(t) + "\n" for t in made).encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train_step_000007.index.json", "train_step_000007.jsonl"]
    assert list(tmp_path.glob("*.jsonl")) == [path]  # other programs search for *.jsonl


def test_half_of_a_surrogate_pair_survives(tmp_path):
    made = make_trajectory()
    made.turns[0].text = "\ud83d"
    (read,) = read_trajectories(write_groups(tmp_path, "train", 1, groups(made)))
    assert read == made


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    before = path.read_bytes()
    broken = make_trajectory()
    broken.metrics["bad"] = object()
    with pytest.raises(TypeError):
        write_groups(tmp_path, "train", 1, groups(make_trajectory(), broken))
    assert path.read_bytes() == before
    assert is_fresh(read_index(path), path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_summary_by_hand():
    made = make_trajectory(
        turns=[
            make_turn(tokens=4, reward=0.25, advantages=[2.0], version_spans=[(3, 4)], components={"a": 0.25}),
            make_turn(
                tokens=2,
                reward=0.5,
                advantages=[-1.0, 0.0],
                finish="length",
                version_spans=[(3, 1), (4, 1)],
                components={"a": 0.5, "b": -1.0},
                trainer_logprobs=[-0.5, -0.8],
                seconds_generate=1.5,
                seconds_environment=0.25,
            ),
            make_turn(tokens=1, observation_ids=[5] * 10, break_reason="template"),
        ],
        score=0.0,
        stop_reason=StopReason.CONTEXT_LIMIT,
        error="Traceback\n  line\nValueError: no\n",
    )
    found = summarise_line(to_json(made).encode(), 0)
    assert found._asdict() | {"offset": 0, "length": 0} == LineSummary(
        0, 0, "t", "g", 0, 0.75, 0.0, "context_limit", 3, 7, 4, 1, 11, 0, 4, (4 * 2.0 - 1.0) / 6, True,
        pytest.approx(0.3), {"a": 0.75, "b": -1.0}, [0.25, 0.5, 0.0], True, 1.75, "ValueError: no", None,
    )._asdict()  # fmt: skip


def test_a_context_is_that_of_the_turn_it_extends():
    turns = [
        make_turn(tokens=4, observation_ids=[5] * 3),
        make_turn(tokens=1, observation_ids=[5] * 50, break_reason="fresh"),
        make_turn(tokens=2, observation_ids=[5], parent=0),
    ]
    made = make_trajectory(turns=turns)
    assert summarise_line(to_json(made).encode(), 0).context == made.context_tokens == 3 + 4 + 1 + 2
    turns[2].parent = 7
    assert "IndexError" in summarise_line(to_json(made).encode(), 0).problem


def test_a_missing_advantage_is_not_zero():
    summary = summarise_line(to_json(make_trajectory()).encode(), 0)
    assert (summary.advantage, summary.informative, summary.drift) == (None, None, None)
    still = make_trajectory(turns=[make_turn(advantages=[0.0], trainer_logprobs=[-0.5] * 3)])
    summary = summarise_line(to_json(still).encode(), 0)
    assert (summary.advantage, summary.informative, summary.drift) == (0.0, False, 0.0)


def test_numbers_that_are_not_finite_are_none():
    made = make_trajectory(rewards=(math.nan, 1.0), score=math.inf)
    made.turns[0].components = {"bad": math.nan, "good": 1.0}
    summary = summarise_line(to_json(made).encode(), 0)
    assert (summary.reward, summary.score, summary.problem) == (None, None, None)
    assert summary.rewards == [None, 1.0] and summary.components == {"good": 1.0}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\n", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b"[]", "no trajectory: TypeError"),
        (b"3", "no trajectory: TypeError"),
        (b"{}", "no trajectory: KeyError"),
        (b'{"turns": 3}', "no trajectory: TypeError"),
        (b'{"turns": [[]], "task_id": "a"}', "no trajectory: TypeError"),
        (
            b'{"turns": [], "task_id": "a", "group_id": "g", "index": "x", "stop_reason": ""}',
            "no trajectory: ValueError",
        ),
    ],
)
def test_lines_that_are_no_trajectory(line, problem):
    summary = summarise_line(line, 5)
    assert summary.problem.startswith(problem)
    assert (summary.offset, summary.length, summary.turns) == (5, len(line), 0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PATHS = ["task_id", "group_id", "index", "stop_reason", "score", "error", "trainable", "turns"]
TURN_PATHS = ["observation_ids", "action_ids", "action_logprobs", "version_spans", "finish", "reward", "components",
              "advantages", "trainer_logprobs", "break_reason", "seconds_generate"]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*((p, None) for p in PATHS), *(("turns", p) for p in TURN_PATHS)]), json_values)
def test_no_content_of_a_line_raises(tmp_path_factory, place, value):
    """The summaries can be stored and read back."""
    data = json.loads(to_json(make_trajectory()))
    if place[1] is None:
        data[place[0]] = value
    else:
        data["turns"][0][place[1]] = value
    path = tmp_path_factory.getbasetemp() / "summarised.jsonl"
    path.write_bytes(b"x" * 10)
    index = TrajectoryIndex(stamp_of(path), [summarise(data, 0, 10)])
    write_index(path, index)
    assert read_index(path) == index


def test_scanning_gives_the_summaries_of_writing(tmp_path):
    path = write_groups(tmp_path, "train", 1, groups(*(make_trajectory(index=n) for n in range(5))))
    written = read_index(path)
    assert written.stamp == stamp_of(path)
    assert list(scan(path)) == written.lines
    assert list(scan(path, written.lines[2].offset)) == written.lines[2:]


def test_a_half_written_line_is_left_out(tmp_path):
    path = tmp_path / "growing.jsonl"
    line = to_json(make_trajectory()).encode()
    path.write_bytes(line + b"\n" + line[:50])
    assert len(list(scan(path))) == 1
    path.write_bytes(line + b"\n" + line)
    assert [s.problem for s in scan(path)] == [None, None]  # the line is whole except for its line end
    path.write_bytes(line + b"\n" + line[:50] + b"\n\n  \n" + line + b"\n")
    first, broken, last = scan(path)
    assert (first.problem, last.problem) == (None, None) and broken.problem.startswith("not JSON")
    assert path.read_bytes()[last.offset : last.offset + last.length] == line + b"\n"


def test_a_line_that_ends_during_the_read_is_left_for_the_next_read(tmp_path, monkeypatch):
    path = tmp_path / "growing.jsonl"
    line = to_json(make_trajectory()).encode()
    path.write_bytes(line[:50])

    def summarise_line(data, offset):
        with path.open("ab") as file:
            file.write(line[50:] + b"\n")
        return real(data, offset)

    real = trajectories.summarise_line
    with monkeypatch.context() as patch:
        patch.setattr(trajectories, "summarise_line", summarise_line)
        assert list(scan(path)) == []
    assert [s.problem for s in scan(path)] == [None]


def test_whole_lines_end_before_a_line_that_is_being_written(tmp_path):
    path = tmp_path / "growing.jsonl"
    path.write_bytes(b"one\ntwo\nth")
    with path.open("rb") as file:
        lines = whole_lines(file)
        assert [next(lines), next(lines)] == [b"one\n", b"two\n"]
        assert next(lines, None) is None
        with path.open("ab") as more:
            more.write(b"ree\nfour\n")
        assert next(lines, None) is None  # the rest of a line whose start was read before
    with path.open("rb") as file:
        assert list(whole_lines(file)) == [b"one\n", b"two\n", b"three\n", b"four\n"]


def test_a_line_that_is_too_long_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectories, "LONGEST_LINE", 4096)
    line = to_json(make_trajectory()).encode() + b"\n"
    path = tmp_path / "long.jsonl"
    path.write_bytes(line + b"x" * 3_000_000 + b"\n" + line)
    first, long, last = scan(path)
    assert "longer than" in long.problem and long.length == 3_000_001
    assert (first.problem, last.problem) == (None, None)


def test_an_index_is_fresh_until_its_file_changes(tmp_path):
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    index = read_index(path)
    assert is_fresh(index, path) and continues(index, path)
    with path.open("ab") as file:
        file.write(to_json(make_trajectory()).encode() + b"\n")
    assert not is_fresh(index, path) and continues(index, path)
    text = path.read_bytes()
    path.write_bytes(text.replace(b"say 0", b"SAY 0"))
    assert not is_fresh(index, path) and not continues(index, path)
    path.write_bytes(b"")
    assert not is_fresh(index, path) and not continues(index, path)


def test_a_rewrite_of_the_same_size_is_noticed(tmp_path):
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    found = path.stat()
    path.write_bytes(path.read_bytes().replace(b"say 1", b"SAY 1"))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not is_fresh(read_index(path), path)


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format":1', '"format":0'),
        lambda text: text.replace('"lines":[[0,', '"lines":[["0",'),
        lambda text: text.replace('"lines":[[0,', '"lines":[[-5,'),
        lambda text: text.replace('"lines":[[0,', '"lines":[[99999999,'),
        lambda text: text.replace('"task_id"', '"task"'),
        lambda text: text.replace('"lines":[[', '"lines":[[],['),
    ],
)
def test_a_broken_index_is_none(tmp_path, harm):
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    text = index_path(path).read_text()
    assert harm(text) != text
    index_path(path).write_text(harm(text))
    assert read_index(path) is None


def test_an_index_that_is_a_pipe_or_leads_elsewhere_is_none(tmp_path):
    """The thread that indexes the runs of the viewer would wait for the pipe for ever."""
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    (tmp_path / "run").mkdir()
    copy = path.rename(tmp_path / "run" / path.name)
    index_path(copy).symlink_to(index_path(path))
    assert read_index(path) is not None and read_index(copy) is None
    index_path(copy).unlink()
    os.mkfifo(index_path(copy))
    assert read_index(copy) is None


def test_a_missing_index_is_none(tmp_path):
    assert read_index(tmp_path / "nothing.jsonl") is None


def test_storing_an_index_leaves_nothing_else(tmp_path):
    path = write_groups(tmp_path, "train", 1, groups(make_trajectory()))
    index = read_index(path)
    write_index(path, index)
    assert read_index(path) == index
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train_step_000010.jsonl", ("train", 10)),
        ("eval_greedy_step_000000.jsonl", ("eval_greedy", 0)),
        ("base_greedy.jsonl", ("base_greedy", None)),
        ("a_step_b_step_3.jsonl", ("a_step_b", 3)),
        ("_step_.jsonl", ("_step_", None)),
        (f"train_step_{'9' * 40}.jsonl", (f"train_step_{'9' * 40}", None)),
    ],
)
def test_names_of_files(tmp_path, name, expected):
    assert kind_and_step(tmp_path / name) == expected
