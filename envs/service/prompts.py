"""All texts of the prompts, except the procedure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message

ROLE = """You are the service desk of a shop, and talk with a customer. A turn without tool calls is said to the \
customer, who then answers. A turn with tool calls is not heard by the customer. Tell the customer no code that you \
have not read, and nothing about an order whose postcode the customer does not know. Follow this procedure:
"""
PROCEDURE = Path(__file__).parent / "procedure.md"


def short_prompt(opening: str) -> list[Message]:
    """Return the prompt for the tiny policy, which knows the procedure from its warm start."""
    return [{"role": "user", "content": opening}]


def full_prompt(opening: str, example: Sequence[Line]) -> list[Message]:
    """Return the prompt for a language model: a system message with the procedure and a worked example, and the
    customer's first words."""
    procedure = PROCEDURE.read_text(encoding="utf-8").strip()
    system = with_example(f"{ROLE}\n{procedure}", example)
    return [{"role": "system", "content": system}, {"role": "user", "content": opening}]
