"""Creates the runner of the programs from `generator.agent`."""

from __future__ import annotations

from mtrl.agents.callable import CallableRunner
from mtrl.agents.program import ProgramRunner
from mtrl.agents.remote import RemoteRunner
from mtrl.agents.runner import Runner
from mtrl.config.engine_schema import AgentConfig
from mtrl.utils.functions import load_function


def make_runner(agent: AgentConfig) -> Runner:
    """Create the runner of the configured agent.

    Raises:
        UserError: the function cannot be imported, or the agent at `url` does not answer.
    """
    if agent.target is not None:
        return CallableRunner(load_function(agent.target, "generator.agent.target"), agent.max_concurrent)
    if agent.command is not None:
        return ProgramRunner(agent.command, agent.env, agent.max_concurrent, agent.pass_env)
    assert agent.url is not None, "generator.agent names no program"
    return RemoteRunner(agent.url, agent.api_key_env)
