"""An environment of OpenEnv, in this process."""

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    echo: str = ""


class Echo(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(echo="Say something long.")

    def step(self, action: Say, timeout_s=None, **kwargs):
        return Heard(echo=action.message, reward=min(len(action.message) / 10, 1.0), done=True)

    @property
    def state(self):
        return State()
