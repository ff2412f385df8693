"""A small OpenEnv environment for the test of a server; it is imported only if OpenEnv is installed."""

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    word: str


class GuessObservation(Observation):
    text: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return GuessObservation(text="yes or no?")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.word == "yes"
        return GuessObservation(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        return State()
