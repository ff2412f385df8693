"""Environments written as the Multi-Turn Training Guide writes them, run by the episode loop."""

from functools import partial

import pytest

from mtrl.environments.base import BaseEnvironment
from mtrl.types import StopReason


class MyMultiTurnEnv(BaseEnvironment):
    """The environment of the guide, unchanged, with hooks of these tests."""

    def __init__(self, max_turns: int = 5):
        self.max_turns = max_turns
        self.current_turn = 0

    def step(self, response: str, ground_truth: dict) -> tuple:
        self.current_turn += 1

        # Check if task is complete
        if self.is_correct(response, ground_truth):
            return 1.0, None, True  # reward, observation, done

        # Continue with feedback
        if self.current_turn < self.max_turns:
            feedback = self.get_feedback(response)
            return 0.0, feedback, False  # partial reward, next obs, not done

        # Max turns reached
        return 0.0, None, True

    def reset(self):
        self.current_turn = 0

    def is_correct(self, response, ground_truth):
        return response == ground_truth["answer"]

    def get_feedback(self, response):
        return f"{response} is wrong"

    def is_well_formatted(self, response):
        return len(response) == 1

    def calculate_progress(self, response, ground_truth):
        return 1 - abs(ord(response) - ord(ground_truth["answer"])) / 26


class FinalOnly(MyMultiTurnEnv):
    """Overrides the `step` that counts turns, so that the base class counts them."""

    def step(self, response, ground_truth):
        if self.is_correct(response, ground_truth):
            return 1.0, None, True
        if self.current_turn >= self.max_turns:
            return 0.0, None, True
        return 0.0, self.get_feedback(response), False


class TurnLevel(MyMultiTurnEnv):
    def step(self, response, ground_truth):
        if self.is_correct(response, ground_truth):
            return 1.0, None, True
        if self.is_well_formatted(response):
            return 0.2 / self.max_turns, self.get_feedback(response), False
        return 0.0, self.get_feedback(response), False


class Progress(MyMultiTurnEnv):
    def step(self, response, ground_truth):
        self.current_turn += 1  # without this the guide's pattern never gives the partial credit
        progress = self.calculate_progress(response, ground_truth)
        if progress >= 1.0:
            return 1.0, None, True
        if self.current_turn >= self.max_turns:
            return progress, None, True  # Partial credit
        return progress * 0.1, self.get_feedback(response), False


@pytest.mark.parametrize(
    ("environment", "text", "rewards"),
    [
        (MyMultiTurnEnv, "ax", [0.0, 1.0]),
        (MyMultiTurnEnv, "abc", [0.0, 0.0, 0.0]),
        (FinalOnly, "ax", [0.0, 1.0]),
        (FinalOnly, "abc", [0.0, 0.0, 0.0]),
        (TurnLevel, "ax", [0.2 / 3, 1.0]),
        (TurnLevel, "abc", [0.2 / 3] * 3),
        (Progress, "wx", [0.1 * 25 / 26, 1.0]),
        (Progress, "wvw", [0.1 * 25 / 26, 0.1 * 24 / 26, 25 / 26]),
    ],
)
def test_the_patterns_of_the_guide(make_loop, run_episode, environment, text, rewards):
    trajectory = run_episode(make_loop(partial(environment, max_turns=3), list(text)))
    assert trajectory.error is None, trajectory.error
    assert [turn.reward for turn in trajectory.turns] == pytest.approx(rewards)
    ended = environment is not TurnLevel or rewards[-1] == 1.0  # never ends, so the loop ends the episode
    assert trajectory.stop_reason == (StopReason.DONE if ended else StopReason.MAX_TURNS)
    received = [message["content"] for message in trajectory.messages if message["role"] == "user"][1:]
    assert received == [f"{word} is wrong" for word in text][: len(rewards) - ended]
