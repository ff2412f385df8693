"""An agent of smolagents, with smolagents' own loop and prompts: word problems with a calculator.

pip install 'mtrl-agents[smolagents]'
mtrl train experiment=agent_word_problems generator.agent.target=examples.agents.smolagents_agent.run model=qwen2_5_1_5b

The answer is a call of smolagents' own tool `final_answer`, which the warm start of the tiny policy does not teach; its
system prompt has 3,500 characters.
"""

from __future__ import annotations

from typing import Any

from examples.agents import openai_tools
from mtrl.errors import missing_extra

try:
    from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool
except ImportError as error:
    raise missing_extra("smolagents", "smolagents") from error

MOST_STEPS = openai_tools.MOST_CALLS - 1
"""Maximum number of steps with tools; smolagents then asks for a final answer in one more call, without tools."""


@tool
def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses.

    Args:
        expression: the expression.
    """
    return openai_tools.calculate(expression)  # smolagents reports exceptions to the model


def run(row: dict[str, Any], client: Any) -> float:
    """Run one episode for `generator.agent.target`, and return the reward of the agent's answer."""
    return solve(row, client)


def solve(row: dict[str, Any], client: Any, **settings: Any) -> float:
    """Run one episode; `settings` are further arguments of smolagents' agent, such as `planning_interval`."""
    *system, question = [message["content"] for message in row["prompt"]]
    # smolagents forces a call by default, which the gateway refuses: the model alone decides what it calls. Its retries
    # would pause for minutes, but the gateway's refusals are permanent.
    options = {"tool_choice": "auto", "retry": False}
    model = OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key, **options)
    settings |= {"instructions": "\n".join(system) or None, "verbosity_level": LogLevel.OFF}
    answer = ToolCallingAgent([calculate], model, max_steps=MOST_STEPS, **settings).run(question)
    return openai_tools.reward(str(answer).strip(), row["ground_truth"]["answer"])
