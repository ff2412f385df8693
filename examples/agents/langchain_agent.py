"""A LangChain agent, with LangChain's own loop: word problems with a calculator.

pip install 'mtrl-agents[langchain]'
mtrl train experiment=agent_word_problems generator.agent.target=examples.agents.langchain_agent.run
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from examples.agents import openai_tools
from mtrl.errors import missing_extra

try:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
except ImportError as error:
    raise missing_extra("langchain", "langchain") from error

MOST_STEPS = 2 * openai_tools.MOST_CALLS
"""Maximum number of steps of the graph: a call of the model is one step, and so are its tool calls."""


@tool
def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and parentheses."""
    try:
        return openai_tools.calculate(expression)
    except (ValueError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


async def run(row: dict[str, Any], client: Any) -> float:
    """Run one episode for `generator.agent.target`, and return the reward of the agent's answer."""
    model = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key)
    agent = create_agent(model, tools=[calculate])
    try:
        state = await agent.ainvoke({"messages": row["prompt"]}, {"recursion_limit": MOST_STEPS})
    except (GraphRecursionError, ValidationError):  # too many tool calls, or one whose arguments are no object
        return 0.0
    return openai_tools.reward(state["messages"][-1].text, row["ground_truth"]["answer"])
