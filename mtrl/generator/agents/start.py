"""Creates the runner of the programs from `generator.agent`."""

from __future__ import annotations

from mtrl.algorithms.registry import load_function
from mtrl.config.agent_schema import AgentConfig
from mtrl.generator.agents.callable import CallableRunner
from mtrl.generator.agents.program import ProgramRunner
from mtrl.generator.agents.remote import RemoteRunner
from mtrl.generator.agents.runner import Runner


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
