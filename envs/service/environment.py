"""One episode: the agent talks with a customer, and reads and changes the orders of a shop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.service.case import Customer
from envs.service.customer import Counterpart, ScriptedCustomer
from envs.service.endpoint import EndpointCustomer, settings_of
from envs.service.reward import judge
from envs.service.speech import spoken
from envs.service.store import Store
from mtrl.environments.base import StepResult
from mtrl.environments.tools import ToolEnvironment, tool, toolbox
from mtrl.errors import UserError
from mtrl.types import Message, Row

CUSTOMERS = ("scripted", "endpoint")
"""Valid values of `environment.config.customer`."""


class ServiceEnv(ToolEnvironment):
    """A turn with tool calls receives their results; a turn without calls is said to the customer, whose answer is the
    observation. Text beside calls is not said. The call of `end_conversation` ends the episode and receives the reward:
    1.0 if the orders are in the right state and the customer was told the right codes, else 0.0."""

    def __init__(
        self,
        max_turns: int = 11,
        customer: str = "scripted",
        endpoint: Mapping[str, Any] | None = None,
        **config: Any,
    ):
        """
        Args:
            customer: `scripted`, or `endpoint` for a model behind a chat API.
            endpoint: settings of the endpoint, see `envs.service.endpoint.EndpointSettings`.

        Raises:
            UserError: a setting is wrong.
        """
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 2:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to talk; set it to 2 or more")
        if customer not in CUSTOMERS:
            raise UserError(
                f"environment.config.customer={customer} is not known; choose one of {', '.join(CUSTOMERS)}"
            )
        if customer != "endpoint" and endpoint is not None:
            raise UserError(
                f"environment.config.endpoint has no effect with environment.config.customer={customer}; set "
                "customer=endpoint, or remove it"
            )
        self.endpoint = settings_of(endpoint) if customer == "endpoint" else None

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        if row is None or not {"orders", "customer"} <= row.keys():
            raise UserError(
                f"row {(row or {}).get('id')} has no orders and customer; the rows of service are generated, so leave "
                "data.path at null"
            )
        self.store = Store(row["orders"])
        self.toolbox = toolbox(self.store, self)
        self.speeches: list[str] = []
        self.counterpart = self._make_counterpart(Customer.of(row))
        return None

    @tool
    def end_conversation(self) -> StepResult:
        """End the conversation when all is done and said."""
        return StepResult(0.0, "The conversation has ended.", done=True)

    async def answer(  # type: ignore[override]  # the base allows an async method
        self, response: str, ground_truth: dict[str, Any]
    ) -> StepResult:
        """Say the response to the customer.

        Raises:
            EndpointError: the customer's endpoint gave no usable answer.
        """
        self.speeches.append(spoken(response))
        reply = await self.counterpart.reply(self.speeches[-1])
        over = self.current_turn >= self.max_turns
        return StepResult(0.0, reply, done=over, truncated=over)

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> StepResult:
        result: StepResult = await super().respond(message, response, ground_truth)
        if not result.done:
            return result
        verdict = judge(self.store.state(), self.speeches, ground_truth)
        reward = 0.0 if result.truncated else verdict.reward
        metrics = {**result.metrics, **verdict.metrics}
        return replace(result, reward=reward, components={"solved": reward}, metrics=metrics)

    def _make_counterpart(self, facts: Customer) -> Counterpart:
        return ScriptedCustomer(facts) if self.endpoint is None else EndpointCustomer(facts, self.endpoint)


def offline(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings with the scripted customer in place of a model; None if the customer is scripted."""
    if config.get("customer", "scripted") == "scripted":
        return None
    return {key: value for key, value in config.items() if key not in ("customer", "endpoint")}
