"""An agent of Pydantic AI, with Pydantic AI's own loop: word problems with a calculator.

pip install 'mtrl-agents[pydantic-ai]'
mtrl train experiment=agent_word_problems generator.agent.target=examples.agents.pydantic_ai_agent.run
"""

from __future__ import annotations

from typing import Any

from examples.agents import openai_tools
from mtrl.errors import missing_extra

try:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError as error:
    raise missing_extra("pydantic-ai-slim", "pydantic-ai") from error


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses."""
    try:
        return openai_tools.calculate(expression)
    except (ValueError, ArithmeticError, RecursionError) as error:  # Pydantic AI would end the episode
        return f"Error: {error}"


async def run(row: dict[str, Any], client: Any) -> float:
    """Run one episode for `generator.agent.target`, and return the reward of the agent's answer."""
    *system, question = [message["content"] for message in row["prompt"]]
    async with client.async_openai() as openai:
        model = OpenAIChatModel(client.model, provider=OpenAIProvider(openai_client=openai))
        agent = Agent(model, instructions=system, tools=[calculate], retries=openai_tools.MOST_CALLS)
        limits = UsageLimits(request_limit=openai_tools.MOST_CALLS)
        try:
            result = await agent.run(question, usage_limits=limits)
        except (UsageLimitExceeded, UnexpectedModelBehavior):  # too many calls, or none that Pydantic AI can read
            return 0.0
    return openai_tools.reward(result.output.strip(), row["ground_truth"]["answer"])
