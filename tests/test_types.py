"""The data types are written as JSON and read back without loss."""

import json
import struct
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrl.types import (
    ENVIRONMENT,
    FinishReason,
    Group,
    Sample,
    StopReason,
    TopTokens,
    Trajectory,
    Turn,
    group_from_dict,
    read_trajectories,
    to_dict,
    to_json,
    trajectory_from_dict,
    write_jsonl,
)

floats = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 200_000), max_size=6)
texts = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}, optional={"x": values})
numbers = st.dictionaries(texts, floats, max_size=3)
turns = st.builds(
    Turn,
    observation_ids=ids,
    action_ids=ids,
    action_logprobs=st.lists(floats, max_size=6),
    version_spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
    finish=st.sampled_from(FinishReason),
    text=texts,
    message=messages,
    observation=st.lists(messages, max_size=2),
    reward=floats,
    components=numbers,
    metrics=numbers,
    break_reason=st.none() | texts,
    seconds_generate=floats,
    seconds_environment=floats,
    experts=st.none() | st.just("int8:1:1:AA=="),
)
trajectories = st.builds(
    Trajectory,
    task_id=texts,
    group_id=texts,
    index=st.integers(0, 99),
    turns=st.lists(turns, max_size=3),
    stop_reason=st.sampled_from(StopReason),
    final_observation=st.lists(messages, max_size=2),
    metrics=numbers,
    score=st.none() | floats,
    trainable=st.booleans(),
    error=st.none() | texts,
)


def bits(value):
    """Return the value with each float as its 64 bits, so that -0.0 differs from 0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def fields(trajectory):
    return bits(json.loads(to_json(trajectory)))


@given(trajectories)
def test_a_trajectory_is_restored_from_json_bit_for_bit(trajectory):
    back = trajectory_from_dict(json.loads(to_json(trajectory)))
    assert back == trajectory
    assert bits([t.action_logprobs for t in back.turns]) == bits([t.action_logprobs for t in trajectory.turns])
    assert fields(back) == fields(trajectory)
    assert isinstance(back.stop_reason, StopReason)
    assert all(isinstance(turn.finish, FinishReason) for turn in back.turns)
    assert all(isinstance(span, tuple) for turn in back.turns for span in turn.version_spans)


@settings(max_examples=30)  # the test above tries more trajectories
@given(st.lists(trajectories, max_size=3), st.dictionaries(texts, values, max_size=3))
def test_a_group_is_restored_from_json(members, row):
    group = Group("g", row, members)
    assert group_from_dict(json.loads(to_json(group))) == group


@settings(max_examples=30)
@given(st.lists(trajectories, max_size=3))
def test_to_dict_equals_asdict_and_copies_no_numbers(members):
    group = Group("g", {"id": "r"}, members)
    expected = asdict(group)
    for turn in (turn for trajectory in expected["trajectories"] for turn in trajectory["turns"]):
        if turn["experts"] is None:
            del turn["experts"]
    assert json.dumps(to_dict(group)) == json.dumps(expected)
    for trajectory, data in zip(members, to_dict(group)["trajectories"], strict=True):
        for turn, plain in zip(trajectory.turns, data["turns"], strict=True):
            assert plain["action_ids"] is turn.action_ids and plain["action_logprobs"] is turn.action_logprobs


@given(st.lists(floats, min_size=1, max_size=4))
def test_a_sample_is_restored_from_json(numbers):
    size = len(numbers)
    sample = Sample([1] * size, [True] * size, numbers, numbers, [0] * size, [0] * size, "g", 2)
    back = Sample(**json.loads(to_json(sample)))
    assert back == sample and bits(back.logprobs) == bits(sample.logprobs)
    sample.teacher = TopTokens(np.arange(2 * size).reshape(size, 2), np.array([numbers, numbers]).T)
    stored = json.loads(to_json(sample))["teacher"]
    expected = {name: array.tolist() for name, array in vars(sample.teacher).items()}
    assert stored.keys() == expected.keys() and bits(stored) == bits(expected)
    sample.experts = np.arange(4 * size, dtype=np.int16).reshape(size, 2, 2) - 1
    assert "experts" not in json.loads(to_json(sample))


@given(st.lists(trajectories, max_size=3))
@example([Trajectory("\u2028 \u2029 \x85 \r \n \x0b \x1e", "g", 0)])
def test_every_value_is_one_line(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("types") / "file.jsonl"
    write_jsonl(path, written)
    assert path.read_bytes().count(b"\n") == len(written)
    assert list(read_trajectories(path)) == written


def test_write_jsonl_appends_by_default(tmp_path):
    path = tmp_path / "file.jsonl"
    first, second = Trajectory("a", "g", 0), Trajectory("b", "g", 1)
    write_jsonl(path, [first])
    write_jsonl(path, [second])
    assert list(read_trajectories(path)) == [first, second]
    write_jsonl(path, [second], mode="w")
    assert list(read_trajectories(path)) == [second]


@pytest.fixture
def trajectory():
    def turn(reward, spans, says, hears):
        tokens = sum(count for _, count in spans)
        return Turn(
            [1],
            [2] * tokens,
            [0.0] * tokens,
            spans,
            FinishReason.STOP,
            says,
            {"says": says},
            [{"hears": hears}],
            reward,
        )

    return Trajectory(
        "task",
        "g",
        0,
        [turn(0.5, [(4, 2), (3, 1)], "a", "q"), turn(1.0, [], "b", "o")],
        final_observation=[{"last": 1}],
    )


def test_properties_are_derived_from_turns(trajectory):
    assert trajectory.reward == 1.5
    assert trajectory.rewards == trajectory.environment_rewards == [0.5, 1.0]
    trajectory.turns[0].components = {ENVIRONMENT: 0.25}  # a composition has replaced the reward
    assert (trajectory.rewards, trajectory.environment_rewards) == ([0.5, 1.0], [0.25, 1.0])
    assert trajectory.action_tokens == 3
    assert trajectory.turns[0].versions == [4, 4, 3]
    assert trajectory.oldest_version == 3
    assert trajectory.messages == [{"hears": "q"}, {"says": "a"}, {"hears": "o"}, {"says": "b"}, {"last": 1}]


def test_a_trajectory_without_tokens_has_no_version():
    assert Trajectory("task", "g", 0).oldest_version is None
