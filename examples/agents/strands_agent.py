"""An agent of Strands Agents, with Strands' own loop: word problems with a calculator.

pip install 'mtrl-agents[strands]'
mtrl train experiment=agent_word_problems generator.agent.target=examples.agents.strands_agent.run
"""

from __future__ import annotations

from typing import Any

from examples.agents import openai_tools
from mtrl.errors import missing_extra

try:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel
    from strands.types.exceptions import MaxTokensReachedException
except ImportError as error:
    raise missing_extra("strands-agents", "strands") from error


@tool
def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses."""
    return openai_tools.calculate(expression)  # Strands reports exceptions to the model


async def run(row: dict[str, Any], client: Any) -> float:
    """Run one episode for `generator.agent.target`, and return the reward of the agent's answer."""
    *system, question = [message["content"] for message in row["prompt"]]
    address = {"base_url": client.base_url, "api_key": client.api_key}
    model = OpenAIModel(client_args=address, model_id=client.model)
    # Strands tries six times by default, with pauses of minutes, but the gateway's refusals are permanent.
    settings = {"system_prompt": "\n".join(system) or None, "callback_handler": None, "retry_strategy": None}
    agent = Agent(model, tools=[calculate], **settings)
    try:
        result = await agent.invoke_async(question, limits={"turns": openai_tools.MOST_CALLS})
    except MaxTokensReachedException:  # an answer of the policy was cut
        return 0.0
    return openai_tools.reward(str(result).strip(), row["ground_truth"]["answer"])
