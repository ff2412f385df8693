"""Settings of agents that are programs with a loop of their own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AgentConfig:
    """A program that plays the episodes and asks the policy over HTTP (`mtrl/gateway`), instead of the environment.

    One of `target`, `command` and `url` names it; null for all: the environment is played.
    """

    target: str | None = None
    """`package.module.function` of a Python function `function(row, client)`, sync or async."""
    command: list[str] | None = None
    """A program and its arguments, started anew for every episode in an empty folder."""
    url: str | None = None
    """http://HOST:PORT of an agent that runs already: it is sent `POST /rollout` for every episode."""
    max_concurrent: int = 16
    """Programs that run at once."""
    max_calls: int | None = None
    """Calls of the model in an episode; null: generator.max_turns."""
    max_calls_at_once: int = 8
    """Calls of one episode that may be sampled side by side."""
    max_requests_per_second: float = 100.0
    """Requests of one episode; further ones are refused with 429 and may come again."""
    host: str = "127.0.0.1"
    """Address of this machine at which programs reach the model."""
    port: int = 0
    """Port of it; 0: a free one."""
    env: dict[str, str] = field(default_factory=dict)
    """command: further environment variables of the program; they are in config.yaml, so no secrets."""
    pass_env: list[str] = field(default_factory=list)
    """command: names of environment variables of the trainer, such as keys, that the program gets as well."""
    api_key_env: str = "MTRL_AGENT_KEY"
    """url: environment variable with the token that the agent wants to be shown."""
