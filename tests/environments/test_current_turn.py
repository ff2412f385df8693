"""The base class counts the turns of an environment whose `step` does not count them."""

import asyncio
import functools

import pytest

from envs.gsm8k.environment import Gsm8kEnv
from mtrl.environments.base import BaseEnvironment

ROW = {"id": "r", "prompt": [], "ground_truth": {"answer": "72"}}


class Pasted(BaseEnvironment):
    """The third pattern of the Multi-Turn Training Guide, unchanged, with its two helpers."""

    def calculate_progress(self, response, ground_truth):
        return 0.4

    def get_feedback(self, response):
        return "go on"

    def step(self, response, ground_truth):
        progress = self.calculate_progress(response, ground_truth)
        if progress >= 1.0:
            return 1.0, None, True
        if self.current_turn >= self.max_turns:
            return progress, None, True  # Partial credit
        return progress * 0.1, self.get_feedback(response), False


class Counts(BaseEnvironment):
    def step(self, response, ground_truth):
        self._advance()
        return 0.0, None, self.current_turn >= self.max_turns

    def _advance(self):
        self.current_turn += 1


class Inherits(Pasted):
    def step(self, response, ground_truth):
        return super().step(response, ground_truth)


class InheritsCounting(Counts):
    def step(self, response, ground_truth):
        return super().step(response, ground_truth)


class Overrides(Counts):
    """Overrides `step` without calling the helper that counts."""

    def step(self, response, ground_truth):
        return 0.0, None, self.current_turn >= self.max_turns


class CountsItself(BaseEnvironment):
    def step(self, response, ground_truth):
        self.current_turn += 1
        return 0.0, None, self.current_turn >= self.max_turns


class OverridesStep(CountsItself):
    def step(self, response, ground_truth):
        return 0.0, None, self.current_turn >= self.max_turns


class OverridesGsm8k(Gsm8kEnv):
    def step(self, response, ground_truth):
        return 0.0, "more", self.current_turn >= self.max_turns


class CallsByName(CountsItself):
    def step(self, response, ground_truth):
        return CountsItself.step(self, response, ground_truth)


class CallsInAHelper(CountsItself):
    def step(self, response, ground_truth):
        return self._usual(response, ground_truth)

    def _usual(self, *arguments):
        return super().step(*arguments)


class CountsInside(BaseEnvironment):
    def step(self, response, ground_truth):
        def advance():
            self.current_turn += 1

        advance()
        return 0.0, None, self.current_turn >= self.max_turns


class Dispatches(BaseEnvironment):
    """Calls the method that counts by a name that is computed."""

    def step(self, response, ground_truth):
        return getattr(self, "on_" + response)()

    def on_x(self):
        self.current_turn += 1
        return 0.0, None, self.current_turn >= self.max_turns


def traced(method):
    @functools.wraps(method)
    def call(*arguments):
        return method(*arguments)

    return call


class Decorated(BaseEnvironment):
    @traced
    def step(self, response, ground_truth):
        self.current_turn += 1
        return 0.0, None, self.current_turn >= self.max_turns


class Awaits(BaseEnvironment):
    async def step(self, response, ground_truth):
        return 0.0, None, self.current_turn >= self.max_turns


class NoSuper(BaseEnvironment):
    def __init__(self, max_turns=3):
        self.max_turns = max_turns

    def step(self, response, ground_truth):
        return 0.0, None, self.current_turn >= self.max_turns


COUNTED = [
    Pasted, Counts, Inherits, InheritsCounting, Overrides, OverridesStep, OverridesGsm8k, CallsByName, CallsInAHelper,
    CountsInside, Dispatches, Decorated, Awaits, NoSuper,
]  # fmt: skip


def results_of(environment) -> list:
    results = []
    environment.reset(ROW)
    while not results or not results[-1][2]:
        value = environment.step("x", {})
        results.append(asyncio.run(value) if asyncio.iscoroutine(value) else value)
        assert len(results) < 10, "the episode does not end"
    return results


def test_the_third_pattern_of_the_guide_gives_partial_credit_at_the_last_turn():
    first, second, last = results_of(Pasted(3))
    assert first == second == (pytest.approx(0.04), "go on", False)
    assert last == (0.4, None, True)


@pytest.mark.parametrize("environment", COUNTED)
def test_every_turn_is_counted_once(environment):
    assert len(results_of(environment(max_turns=3))) == 3


def test_reset_sets_the_current_turn_to_0():
    environment = Pasted(3)
    assert len(results_of(environment)) == len(results_of(environment)) == 3
