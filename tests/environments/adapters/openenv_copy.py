"""Copy of the interface of OpenEnv 0.3 to 0.10 (`openenv.core`), for tests without the package.

The package requires a web server, Gradio and a hundred other packages; its environments need only this interface.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

ActT = TypeVar("ActT")
ObsT = TypeVar("ObsT")
StateT = TypeVar("StateT")


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)
    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0


@dataclass
class StepResult(Generic[ObsT]):
    observation: ObsT
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class Environment(ABC, Generic[ActT, ObsT, StateT]):
    def __init__(self, transform=None, rubric=None):
        self.transform, self.rubric = transform, rubric

    @abstractmethod
    def reset(self, seed=None, episode_id=None, **kwargs): ...

    @abstractmethod
    def step(self, action, timeout_s=None, **kwargs): ...

    @property
    @abstractmethod
    def state(self): ...

    def close(self): ...


class EnvClient(ABC, Generic[ActT, ObsT, StateT]):
    """An async client; `sync()` returns a blocking wrapper with the same methods."""


Environment.__module__ = "openenv.core.env_server.interfaces"
EnvClient.__module__ = "openenv.core.env_client"
core = client = sys.modules[__name__]
