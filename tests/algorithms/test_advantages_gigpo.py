"""GiGPO: worked numbers, its definition in loops, and the equality of observations."""

import statistics

import pytest
from groups import flat, make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.advantages.gigpo import anchors
from mtrl.algorithms.batch import CreditBatch
from mtrl.config.algorithm_schema import AlgorithmConfig

REWARDS = [[0.0, 0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
SEEN = [["s0", "s1", "s2"], ["s0", "s1"], ["s0", "s3"]]


def gigpo(*batch, gamma=0.95, **settings):
    return turn_advantages(batch, AlgorithmConfig(advantage_method="gigpo", gamma=gamma, **settings))


def test_gigpo_worked():
    group = make_group(REWARDS, observations=SEEN)
    episode = [0.57735, -1.1547, 0.57735]
    step = [[0.53241, 0.70711, 0.0], [-1.15356, -0.70711], [0.62115, 0.0]]
    for weight in (1.0, 0.5, 0.0):
        expected = [[e + weight * s for s in steps] for e, steps in zip(episode, step, strict=True)]
        assert flat(gigpo(group, turn_advantage_coef=weight)[0]) == pytest.approx(flat(expected), abs=1e-5)


def test_gigpo_without_division_by_the_deviation():
    values = gigpo(make_group(REWARDS, observations=SEEN), norm_by_std=False)[0]
    mean = (0.9025 + 0.0 + 0.95) / 3
    assert [turns[0] for turns in values] == pytest.approx([1 / 3 + 0.9025 - mean, -2 / 3 - mean, 1 / 3 + 0.95 - mean])


def test_returns_that_cancel_count_as_equal():
    group = make_group(
        [[0.1, 0.2, -0.3], [0.0], [-0.3, 0.2, 0.1]], observations=[["s", "a", "b"], ["s"], ["s", "c", "d"]]
    )
    assert [turns[0] for turns in gigpo(group, gamma=1.0)[0]] == [0.0] * 3


@st.composite
def explored(draw):
    """Groups of rewards, and the room of every turn, one of three. A trajectory can visit a room several times."""
    value = st.integers(-8, 8).map(lambda n: n / 8)
    turn = st.tuples(value, st.sampled_from("abc"))
    return draw(st.lists(st.lists(st.lists(turn, max_size=4), min_size=1, max_size=4), min_size=1, max_size=3))


def z_score(value, values, divide):
    if len(set(values)) == 1:
        return 0.0
    return (value - statistics.mean(values)) / (statistics.stdev(values) + 1e-6 if divide else 1.0)


@settings(deadline=None)
@given(batch=explored(), gamma=st.sampled_from([1.0, 0.5]), divide=st.booleans())
def test_gigpo_against_its_definition(batch, gamma, divide):
    expected = []
    for group in batch:
        outcomes = [sum(r for r, _ in turns) for turns in group]
        to_go = [
            [sum(gamma**s * r for s, (r, _) in enumerate(turns[t:])) for t in range(len(turns))] for turns in group
        ]
        rooms = {}
        for turns, returns in zip(group, to_go, strict=True):
            for (_, room), value in zip(turns, returns, strict=True):
                rooms.setdefault(room, []).append(value)
        for i, turns in enumerate(group):
            whole = z_score(outcomes[i], outcomes, divide)
            expected += [whole + z_score(to_go[i][t], rooms[room], divide) for t, (_, room) in enumerate(turns)]
    made = [
        make_group([[r for r, _ in turns] for turns in group], observations=[[s for _, s in turns] for turns in group])
        for group in batch
    ]
    assert flat(gigpo(*made, gamma=gamma, norm_by_std=divide)) == pytest.approx(expected, abs=1e-6)


# ---- what is the same observation


def same(*observations):
    """Return whether two turns of one group have the same anchor."""
    group = make_group([[0.0]] * len(observations))
    for trajectory, observation in zip(group.trajectories, observations, strict=True):
        trajectory.turns[0].observation = observation
    return len(set(anchors(CreditBatch.of([group])).tolist())) == 1


def tool(content="42", **more):
    return {"role": "tool", "content": content, **more}


def test_ids_of_tool_calls_do_not_distinguish_observations():
    assert same([tool(tool_call_id="a1", name="search")], [tool(tool_call_id="b2", name="search")])
    assert same([tool("a"), tool("b")], [tool("a"), tool("b")])
    assert same([], [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([tool("a")], [tool("b")]),
        ([tool("a")], [{"role": "user", "content": "a"}]),
        ([tool(name="search")], [tool(name="open")]),
        ([tool("a"), tool("b")], [tool("b"), tool("a")]),
        ([tool("a"), tool("b")], [tool("a")]),
        ([tool("a")], [tool("a"), tool("a")]),
        ([tool("a")], []),
        ([tool([{"type": "text", "text": "a"}])], [tool([{"type": "text", "text": "b"}])]),
        ([tool([{"type": "text", "text": "a"}])], [tool("a")]),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}], [{"role": "assistant"}]),
    ],
)
def test_different_texts_are_different_observations(one, other):
    assert not same(one, other)
    assert same(one, one)


def test_equal_content_in_parts_is_the_same_observation():
    assert same([tool([{"type": "text", "text": "a"}])], [tool([{"text": "a", "type": "text"}])])


def test_equal_observations_of_different_groups_are_not_compared():
    """Each group has one turn in the same room, so the turn has no peer."""
    batch = [make_group([[float(i)]], observations=[["room"]]) for i in range(3)]
    assert len(set(anchors(CreditBatch.of(batch)).tolist())) == 3
    assert flat(gigpo(*batch)) == [0.0] * 3


def test_only_gigpo_reads_observations():
    group = make_group([[0.0], [1.0]])
    for trajectory in group.trajectories:
        trajectory.turns[0].observation = None
    assert any(flat(turn_advantages([group], AlgorithmConfig())))
    with pytest.raises(TypeError):
        gigpo(group)
