"""SkyRL-Gym environments in the episode loop."""

import threading
from typing import ClassVar

import pytest
from foreign import observed, real

from mtrl.environments.adapters import adapt
from mtrl.types import StopReason

real("skyrl_gym", "skyrl-gym")

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv  # noqa: E402

GSM8K = {
    "id": "r1",
    "prompt": [{"role": "user", "content": "6 * 12?"}],
    "ground_truth": {"answer": "72"},
    "reward_spec": {"method": "rule", "ground_truth": "72"},
    "extra_info": {"max_turns": 9},
}


class Recorder(BaseTextEnv):
    """Records its arguments."""

    made: ClassVar[list] = []

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.env_config, self.extras, self.closed = env_config, extras, 0
        Recorder.made.append(self)

    def init(self, prompt):
        return [{"role": "system", "content": "S"}, *prompt], {"seen": 1}

    def step(self, action):
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": f"heard {action}"}],
            reward=[0.1, None, 1.0][self.turns - 1],
            done=self.turns == 3,
            metadata={"length": len(action), "note": "texts are no metrics"},
            postprocessed_action=action.strip() if self.turns == 2 else None,
        )

    def get_metrics(self):
        return {"steps": self.turns, "name": "recorder"}

    def close(self):
        self.closed += 1


@pytest.fixture
def recorder():
    Recorder.made = []
    return adapt(Recorder)


def test_an_environment_of_skyrl_gets_the_rewards_of_its_own_loop(play):
    """The lists of rewards that SkyRL puts on the last tokens of the turns: 0.2 / max_turns if wrong, 1.0 if right."""
    trajectory = play(adapt(GSM8kMultiTurnEnv), ["no number", "#### 7", "#### 72"], GSM8K, max_turns=5)
    assert trajectory.error is None
    assert trajectory.rewards == [0.0, 0.2 / 5, 1.0]
    assert trajectory.stop_reason == StopReason.DONE
    assert trajectory.turns[-1].metrics["steps"] == 3.0

    theirs = GSM8kMultiTurnEnv(extras={**GSM8K, "max_turns": 5})
    outputs = [theirs.step(turn.text) for turn in trajectory.turns]
    assert [output["reward"] for output in outputs] == trajectory.rewards
    assert [output["observations"] for output in outputs[:2]] == [t.observation for t in trajectory.turns[1:]]


def test_skyrl_make_runs_a_registered_name(play):
    import skyrl_gym

    trajectory = play(adapt(skyrl_gym.make), ["#### 72"], GSM8K, max_turns=1, id="gsm8k_multi_turn")
    assert (trajectory.error, trajectory.rewards) == (None, [1.0])


def test_the_row_and_the_config_reach_the_constructor(play, recorder):
    trajectory = play(recorder, ["a", " b ", "c"], GSM8K, max_turns=4, db_path="somewhere")
    (env,) = Recorder.made
    assert env.env_config.db_path == "somewhere"
    assert env.extras["reward_spec"]["ground_truth"] == "72" and env.extras["max_turns"] == 4
    assert "prompt" not in env.extras
    assert observed(trajectory) == [["S", "6 * 12?"], ["heard a"], ["heard  b "], ["heard c"]]


def test_rewards_metadata_and_metrics_belong_to_their_turns(play, recorder):
    trajectory = play(recorder, ["a", " b ", "c"])
    assert trajectory.rewards == [0.1, 0.0, 1.0]
    assert [turn.metrics for turn in trajectory.turns] == [
        {"length": 1.0},
        {"length": 3.0, "postprocessed_action": 1.0},
        {"length": 1.0, "steps": 3.0},
    ]
    assert trajectory.turns[1].text == " b ", "the sampled text stays, although the environment replaced it"


def test_get_metrics_is_called_when_the_turns_run_out(play, recorder):
    trajectory = play(recorder, ["a", "b"], max_turns=2)
    assert trajectory.stop_reason == StopReason.MAX_TURNS
    assert trajectory.turns[-1].metrics["steps"] == 2.0


def test_the_environment_is_closed_once(play, recorder):
    play(recorder, ["a", "b", "c"])
    assert [env.closed for env in Recorder.made] == [1]


def test_an_error_fails_the_episode_and_closes_the_environment(play, recorder, monkeypatch):
    def broken(self, action):
        raise ZeroDivisionError("inside the environment")

    monkeypatch.setattr(Recorder, "step", broken)
    trajectory = play(recorder, ["a"])
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert trajectory.error.startswith("ZeroDivisionError: inside the environment")
    assert [env.closed for env in Recorder.made] == [1]


def test_an_environment_that_is_made_after_its_time_limit_is_closed(play, monkeypatch):
    go_on, closed = threading.Event(), threading.Event()

    class Slow(Recorder):
        def __init__(self, env_config=None, extras=None):
            go_on.wait(20)
            super().__init__(env_config, extras)

        def close(self):
            closed.set()

    trajectory = play(adapt(Slow), ["a"], step_timeout=0.2)
    assert trajectory.stop_reason == StopReason.TIMEOUT and not closed.is_set()
    go_on.set()
    assert closed.wait(10)
