"""Episodes of gsm8k without a model."""

import pytest

from envs.gsm8k import FAMILY
from mtrl.types import FinishReason, Trajectory, Turn


def play_episode(row, act, max_turns=5, reward="default", calculator=False):
    """Function that returns the trajectory of `act(observation) -> response`, with the reward of each turn."""
    env = FAMILY.environment(max_turns=max_turns, reward=reward, calculator=calculator)
    env.reset(row)
    trajectory, observation = Trajectory(row["id"], row["id"], 0), None
    while True:
        text = act(observation)
        result = env.step(text, row["ground_truth"])
        assert result.reward == sum(result.components.values())
        message = {"role": "assistant", "content": text}
        trajectory.turns.append(Turn([], [], [], [], FinishReason.STOP, text, message, reward=result.reward))
        observation = result.observation
        if result.done:
            return trajectory


@pytest.fixture
def play():
    return play_episode


@pytest.fixture
def play_responses(play):
    """Runs an episode with a list of responses."""

    def run(row, responses, **settings):
        left = iter(responses)
        return play(row, lambda observation: next(left), **settings)

    return run


@pytest.fixture
def row():
    return {"id": "0", "prompt": [{"role": "user", "content": "6*12?"}], "ground_truth": {"answer": "72"}}
