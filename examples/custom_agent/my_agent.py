"""A custom agent, which keeps its messages, runs its tool, and decides when to stop. No library is needed."""

from __future__ import annotations

from typing import Any

from envs.gsm8k.calculator import calculate

ROUNDS = 4


async def run(row: dict[str, Any], client: Any) -> list[float]:
    """Run one episode, and return a reward for each call of the model.

    Args:
        row: `prompt` (messages) and `ground_truth`.
        client: the policy behind OpenAI's API; `client.base_url` and `client.api_key` work with any library.
    """
    messages = list(row["prompt"])
    rewards: list[float] = []
    for _ in range(ROUNDS):
        answer = await client.achat(messages)
        text = answer["content"].strip()
        if text.startswith("#### "):
            is_right = text.removeprefix("#### ") == row["ground_truth"]["answer"]
            return [*rewards, float(is_right)]
        rewards.append(0.0)
        messages += [answer, {"role": "user", "content": result_of(text)}]
    return rewards


def result_of(text: str) -> str:
    """Return the calculator's reply to `<calc>1+2</calc>`, or an instruction if the text has another form."""
    if not (text.startswith("<calc>") and text.endswith("</calc>")):
        return "write <calc> or ####"
    try:
        return calculate(text.removeprefix("<calc>").removesuffix("</calc>"))
    except ValueError as error:
        return f"error: {error}"
