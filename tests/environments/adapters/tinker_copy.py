"""Copy of the interface `tinker_cookbook.rl.message_env` (0.6), for tests without the package."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass
class MessageStepResult:
    reward: float
    episode_done: bool
    next_messages: list
    metrics: dict = field(default_factory=dict)
    logs: dict = field(default_factory=dict)
    next_stop_condition: object = None


class MessageEnv(ABC):
    @abstractmethod
    async def initial_observation(self): ...

    @abstractmethod
    async def step(self, message): ...


MessageEnv.__module__ = "tinker_cookbook.rl.message_env"
