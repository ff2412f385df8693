"""Gymnasium environments in the episode loop."""

import json
from typing import ClassVar

import numpy as np
import pytest
from foreign import observed, real
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.schema import DataConfig
from mtrl.environments.adapters import adapt
from mtrl.environments.family import family_of_class
from mtrl.errors import UserError
from mtrl.types import StopReason

gymnasium = real("gymnasium", "gymnasium")
spaces = gymnasium.spaces


class Target(gymnasium.Env):
    """The right action is a number drawn by the seed; results are numpy values, as in most environments."""

    made: ClassVar[list] = []

    def __init__(self, patience=3, cut=None):
        self.action_space = spaces.Discrete(10)
        self.observation_space = spaces.Text(80)
        self.patience, self.cut, self.closed = patience, cut, 0
        Target.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int((options or {}).get("number", self.np_random.integers(10)))
        self.tries = 0
        return f"hint {self.number}", {"number": self.number}

    def step(self, action):
        self.tries += 1
        right = action == self.number
        out = self.tries == self.cut
        info = {"tries": np.int64(self.tries), "late": np.bool_(out), "path": np.zeros(3), "nan": float("nan")}
        return "no" if not right else "yes", np.float32(0.5 if right else -0.25), np.bool_(right), out, info

    def close(self):
        self.closed += 1


class Classic(Target):
    """An environment as before version 0.26: four results, `reset` without arguments, a `seed` method."""

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        self.number, self.tries = 7, 0
        return f"seeded {self.seeded}"

    def step(self, action):
        observation, reward, right, out, info = super().step(action)
        return observation, reward, bool(right or out), {**info, "TimeLimit.truncated": out}


@pytest.fixture
def target():
    Target.made = []
    return adapt(Target)


@pytest.fixture
def seven(row):
    return {**row, "options": {"number": 7}}


def test_rewards_observations_and_metrics_belong_to_their_turns(play, target, seven):
    trajectory = play(target, ["3", " <action> 5 </action>", "so <action>7</action>"], seven)
    assert trajectory.error is None
    assert trajectory.rewards == [-0.25, -0.25, 0.5]
    assert all(type(reward) is float for reward in trajectory.rewards)
    assert observed(trajectory) == [["Q\n\nhint 7"], ["no"], ["no"], ["yes"]]
    assert trajectory.turns[1].metrics == {"tries": 2.0, "late": 0.0, "invalid_action": 0.0}
    assert trajectory.stop_reason == StopReason.DONE
    assert [env.closed for env in Target.made] == [1]


def test_truncated_is_not_terminated(play, target, seven):
    assert play(target, ["1", "2", "3"], seven, cut=2).stop_reason == StopReason.MAX_TURNS
    assert play(target, ["1", "7"], seven, cut=2).stop_reason == StopReason.DONE, (
        "terminated and truncated at once counts as done"
    )


def test_environments_before_gymnasium_0_26_run(play, row):
    trajectory = play(adapt(Classic), ["1", "7"], {**row, "seed": 11})
    assert (trajectory.rewards, trajectory.stop_reason) == ([-0.25, 0.5], StopReason.DONE)
    assert observed(trajectory)[0] == ["Q\n\nseeded 11"]
    assert play(adapt(Classic), ["1", "2"], {**row, "seed": 11}, cut=2).stop_reason == StopReason.MAX_TURNS


def test_the_row_determines_the_start_of_the_episode(play, target, row):
    def hint(**columns):
        return observed(play(target, ["0"], {**row, **columns}, max_turns=1))[0][0]

    assert hint(seed=3) == hint(seed=3)
    assert hint(id="a") == hint(id="a")
    assert len({hint(seed=n) for n in range(30)}) > 5
    assert len({hint(id=str(n)) for n in range(30)}) > 5


@pytest.mark.parametrize("response", ["", "ten", "10", "-1", "3 or 4", "１", "9" * 5000, "<action>x</action>", "1.0"])
def test_an_invalid_action_does_not_reach_the_environment(play, target, seven, response):
    trajectory = play(target, [response[:300], "7"], seven)
    assert trajectory.rewards == [0.0, 0.5] and trajectory.error is None
    assert observed(trajectory)[1][0].startswith("Invalid action: ")
    assert [turn.metrics["invalid_action"] for turn in trajectory.turns] == [1.0, 0.0]
    assert Target.made[-1].tries == 1


class Arrays(gymnasium.Env):
    """An environment whose action space the test sets."""

    def __init__(self, space=None):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"at": np.array([1, 2]), "done": np.bool_(False)}, {}

    def step(self, action):
        return np.asarray(action), 1.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (spaces.Box(-1.0, 1.0, (2,), np.float32), "[0.5, -1]", ["[2, 0]", "[0.5]", "[NaN, 0]", "{}", "[[1], [1, 2]]"]),
        (spaces.MultiDiscrete([3, 3]), "<action>[2, 0]</action>", ["[3, 0]", "[1]", "[1e400, 0]", f"[{10**30}, 0]"]),
        (spaces.MultiBinary(2), "[1, 0]", ["[2, 0]", "[" * 3000]),
        (spaces.Text(5, charset="abc"), "abc", ["abd", "abcabc"]),
    ],
    ids=["Box", "MultiDiscrete", "MultiBinary", "Text"],
)
def test_actions_of_other_spaces(space, good, bad):
    env = adapt(Arrays)(space=space)
    env.reset({"id": "r", "prompt": []})
    result = env.step(good, {})
    assert (result.reward, result.metrics["invalid_action"]) == (1.0, 0.0)
    for response in bad:
        assert env.step(response, {}).metrics["invalid_action"] == 1.0, response


@pytest.mark.parametrize(
    ("space", "response", "action"),
    [
        (spaces.MultiDiscrete([3, 3]), "[2.0, 0]", [2, 0]),
        (spaces.MultiDiscrete([[3], [3]]), "[[2], [0]]", [[2], [0]]),
        (spaces.MultiDiscrete([3, 3]), "[1.9, 0.2]", None),
        (spaces.MultiDiscrete([3, 3]), '["1", "2"]', None),
        (spaces.MultiDiscrete([3, 3]), "[true, false]", None),
        (spaces.MultiDiscrete([3, 3]), "[true, 2]", None),
        (spaces.MultiDiscrete([3, 3]), "[null, 2]", None),
        (spaces.MultiBinary(2), "[true, false]", [1, 0]),
        (spaces.MultiBinary([2, 1]), "[[1], [0.0]]", [[1], [0]]),
        (spaces.MultiBinary(2), "[0.9, 0]", None),
        (spaces.MultiBinary(2), '["1", "0"]', None),
        (spaces.MultiBinary(2), "[257, 0]", None),
        (spaces.Box(0, 255, (2,), np.uint8), "[0, 255]", [0, 255]),
        (spaces.Box(0, 255, (2,), np.uint8), "[0.5, 1]", None),
        (spaces.Box(0, 255, (2,), np.uint8), "[256, 1]", None),
        (spaces.Box(0, 255, (2,), np.uint8), "[-1, 1]", None),
        (spaces.Box(-1.0, 1.0, (), np.float32), "0.5", 0.5),
        (spaces.Box(-1.0, 1.0, (2,), np.float32), '["0.5", "1"]', None),
        (spaces.Box(-1.0, 1.0, (2,), np.float32), "[true, 0.5]", None),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "[1e38, 0]", [float(np.float32(1e38)), 0.0]),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "[1e99, 0]", None),
        (spaces.Box(-np.inf, np.inf, (2,), np.float64), "[1e400, 0]", None),
    ],
)
def test_no_value_of_an_array_is_changed(space, response, action):
    env = adapt(Arrays)(space=space)
    env.reset({"id": "r", "prompt": []})
    result = env.step(response, {})
    if action is None:
        assert (result.reward, result.metrics["invalid_action"]) == (0.0, 1.0), result.observation
        assert result.observation.startswith("Invalid action: it is not a JSON array of ")
    else:
        assert (result.reward, json.loads(result.observation)) == (1.0, action)


@given(st.text(max_size=60))
def test_no_response_makes_the_environment_fail(response):
    env = adapt(Arrays)(space=spaces.Box(-1.0, 1.0, (2,), np.float32))
    env.reset({"id": "r", "prompt": []})
    assert env.step(response, {}).reward in (0.0, 1.0)


def test_observations_that_are_not_text_are_json():
    opening = adapt(Arrays)(space=spaces.Discrete(2)).reset({"id": "r", "prompt": []})
    assert json.loads(opening[-1]["content"]) == {"at": [1, 2], "done": False}


def test_other_spaces_need_a_parser(play):
    trajectory = play(adapt(Arrays), ["x"], space=spaces.Dict(a=spaces.Discrete(2)))
    assert "environment.config.parse_action" in trajectory.error


def half(response, env):
    return np.array([float(response) / 2] * 2, np.float32)


def shown(observation, env):
    return [{"role": "system", "content": f"seen {json.dumps(observation, default=lambda x: x.tolist())}"}]


def test_own_functions_parse_actions_and_render_observations(play):
    config = {"parse_action": f"{__name__}.half", "render_observation": f"{__name__}.shown", "instruction": "Go."}
    trajectory = play(adapt(Arrays), ["one", "1"], space=spaces.Box(-1.0, 1.0, (2,)), max_turns=2, **config)
    assert observed(trajectory) == [
        ["Q\n\nGo.", 'seen {"at": [1, 2], "done": false}'],
        ["Invalid action: could not convert string to float: 'one'"],
        ["seen [0.5, 0.5]"],
    ]


def test_a_missing_function_is_a_user_error():
    with pytest.raises(UserError, match="environment.config.parse_action"):
        adapt(Arrays)(parse_action="no.such.function")


def test_gymnasium_make_runs_an_environment_by_its_id(play, row):
    """FrozenLake without slipping: right, right, down, down, down, right leads to the goal."""
    made = adapt(gymnasium.make)
    config = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}
    trajectory = play(made, ["2", "2", "1", "1", "1", "2"], row, max_turns=8, **config)
    assert trajectory.error is None
    assert trajectory.rewards == [0.0] * 5 + [1.0] and trajectory.stop_reason == StopReason.DONE
    assert "SFFF" in observed(trajectory)[3][0]


def test_without_a_path_the_rows_are_seeds(target):
    family = family_of_class(target)
    splits = family.load(DataConfig(synthetic_train_rows=5, synthetic_test_rows=3), 1)
    seeds = [row["seed"] for row in (*splits.train, *splits.test)]
    assert len(splits.train) == 5 and len(set(seeds)) == 8
    other = family.load(DataConfig(synthetic_train_rows=5, synthetic_test_rows=3), 2)
    assert not {row["seed"] for row in other.train} & set(seeds)


def test_an_unknown_argument_is_a_user_error(target):
    with pytest.raises(UserError, match=r"environment.config.patient is not an argument of Target\(patience=3"):
        target(patient=3)


def test_a_missing_argument_is_a_user_error():
    class Sized(Target):
        def __init__(self, size):
            super().__init__()

    with pytest.raises(
        UserError, match=r"environment.config=\{\} does not fit Sized\(size\): missing a required argument"
    ):
        adapt(Sized)()


def test_an_invalid_step_result_fails_the_episode(play, seven):
    class Three(Target):
        def step(self, action):
            return "x", 1.0, True

    trajectory = play(adapt(Three), ["7"], seven)
    assert "Three.step returned ('x', 1.0, True); it must return (observation, reward, terminated" in trajectory.error
    assert Target.made[-1].closed == 1
