"""Settings of agent programs, which have a loop of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtrl.config.field import number


@dataclass
class AgentConfig:
    """An agent program that runs the episodes instead of the environment and calls the policy over HTTP
    (`mtrl/gateway`).

    One of `target`, `command` and `url` names the program; if all are null, the environment runs the episodes.
    """

    target: str | None = None
    """`package.module.function` of a Python function `function(row, client)`, sync or async."""
    command: list[str] | None = None
    """A program and its arguments, started in an empty folder for each episode."""
    url: str | None = None
    """http://HOST:PORT of an agent that runs already; it receives `POST /rollout` for each episode."""
    max_concurrent: int = number(16, at_least=1)
    """Maximum number of programs that run at once."""
    max_calls: int | None = number(None, at_least=1)
    """Maximum number of model calls in an episode; null: generator.max_turns."""
    max_calls_at_once: int = number(8, at_least=1)
    """Maximum number of model calls of one episode that are sampled at the same time; further calls wait."""
    max_requests_per_second: float = number(100.0, above=0)
    """Maximum number of requests of one episode per second; further requests are refused with status 429 and can be
    retried."""
    host: str = "127.0.0.1"
    """Address of this machine at which programs reach the model."""
    port: int = number(0, at_least=0)
    """Port at that address; 0: a free port."""
    env: dict[str, str] = field(default_factory=dict)
    """command: additional environment variables of the program. They are written to config.yaml, so they must hold no
    secrets."""
    pass_env: list[str] = field(default_factory=list)
    """command: names of environment variables of the trainer, such as keys, that are passed to the program."""
    api_key_env: str = "MTRL_AGENT_KEY"
    """url: environment variable that holds the token for the requests to the agent."""
