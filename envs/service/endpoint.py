"""The customer as a model behind an OpenAI-compatible chat API.

The model gets the facts of the customer as its instructions. Its text is untrusted: it is cut to `LONGEST` characters,
reaches the agent as the text of a message only, and has no part in the score, which the state of the orders and the
agent's own words decide.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import httpx
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs.service.case import Customer, Wish
from envs.service.customer import opening
from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.config.field import number
from mtrl.engines.endpoints.budget import Budget, check_spending
from mtrl.engines.endpoints.chat_client import (
    Address,
    ChatClient,
    GarbledAnswerError,
    NoAnswerError,
    StatusError,
    check_key,
)
from mtrl.engines.endpoints.engine import EndpointError, as_completion, plain_text
from mtrl.errors import UserError
from mtrl.types import Message
from mtrl.utils.strict_json import canonical

KEY = "environment.config.endpoint"
LONGEST = 1000
"""Maximum length of the customer's text in one turn, in characters."""
LARGEST = 2**20
"""Maximum size of an answer of the endpoint, in bytes."""

INSTRUCTIONS = """\
You play a customer who talks with the service desk of a shop. Say only what the customer says, in one or two short \
sentences. Never play the agent, and never say that you are a model.

Your order is a {item}. Your order number is {order_id} and your postcode is {postcode}; tell each of them only when \
the agent asks for it. You know nothing else about the order.

You want this: {wish}
{change}{push}
If the agent asks you to confirm what you want, say yes. When the agent has told you the result, thank it."""
CHANGE = (
    "As soon as the agent asks you to confirm this, or refuses it, say that you have changed your mind, and that you "
    "want this instead: {wish}\n"
)
PUSH = "If the agent refuses, insist once. If it refuses again, accept that.\n"
NO_PUSH = "If the agent refuses, accept that.\n"
WANTED = {
    "cancel": "the order is cancelled.",
    "address": "the order is sent to {address}.",
    "refund": "you get the price of the order back.",
}
GREETING = "Hello, how can I help you?"
"""First message of the conversation, since some chat templates refuse one that begins with the assistant."""


@dataclass
class EndpointSettings(EndpointConfig):
    """Settings of the customer's endpoint: the section `environment.config.endpoint`."""

    model: str = ""
    """Name of the model."""
    url: str = ""
    """Base URL of the endpoint, such as `http://localhost:8000/v1`."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: no key is sent."""
    timeout: float = number(8.0, above=0)
    """Time limit of one answer, in seconds. All attempts together must end within `environment.step_timeout`."""
    retries: int = number(2, at_least=0)
    max_concurrent: int = number(64, at_least=1)
    """Maximum number of requests at once. The wait for a free place counts within `environment.step_timeout`."""
    max_tokens: int = number(128, at_least=1)
    """Maximum number of tokens of an answer."""


def settings_of(section: Mapping[str, Any] | None) -> EndpointSettings:
    """Read and check the section of the configuration.

    Raises:
        UserError: a key is unknown or has a wrong value, the address is none, or the key's variable holds no key.
    """
    names = ", ".join(each.name for each in fields(EndpointSettings))
    values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section or {}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EndpointSettings), values)
        settings: EndpointSettings = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(f"{KEY}={values} is not understood ({first}); it takes {names}") from error
    for each in fields(EndpointSettings):
        bound, value = each.metadata.get("bound"), getattr(settings, each.name)
        if bound is not None and (broken := bound.broken_by(value)):
            raise UserError(f"{KEY}.{each.name}={value} must be {broken}")
    check_address(settings)
    check_spending(KEY, settings.price, settings.budget)
    check_key(settings, f"{KEY}.api_key_env")
    return settings


def check_address(settings: EndpointSettings) -> None:
    """Check the name of the model and the URL.

    Raises:
        UserError: one of them is missing or malformed.
    """
    if not settings.model.strip():
        raise UserError(f"{KEY}.model is empty; name the model that plays the customer")
    try:
        url = httpx.URL(settings.url)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.userinfo:
        raise UserError(f"{KEY}.url holds a password; write it without, and name {KEY}.api_key_env")
    if url.scheme not in ("http", "https") or not url.host:
        raise UserError(f"{KEY}.url={settings.url} is no address; write http://host:port/v1")


class EndpointCustomer:
    """The customer of one episode. The same words of the agent may get other answers in another episode."""

    def __init__(self, facts: Customer, settings: EndpointSettings):
        self.settings = settings
        self.messages: list[Message] = [
            {"role": "system", "content": instructions(facts)},
            {"role": "user", "content": GREETING},
            {"role": "assistant", "content": opening(facts)},
        ]
        """The conversation from the customer's side: the agent's words have the role `user`."""

    async def reply(self, speech: str) -> str:
        """Return the customer's answer to the agent's words.

        Raises:
            EndpointError: no attempt brought a usable answer, or the endpoint refused the conversation.
            BudgetSpentError: the rest of the budget is too small for another request.
        """
        settings = self.settings
        self.messages.append({"role": "user", "content": speech})
        body = {"model": settings.model, "messages": self.messages, "max_tokens": settings.max_tokens}
        body |= {str(key): value for key, value in settings.extra_body.items()}
        body = {key: value for key, value in body.items() if value is not None}
        where = f"the customer's model {settings.model} at {settings.url}"
        try:
            answer = await client_of(settings).request_and_close(body, read_reply)
        except NoAnswerError as error:
            raise EndpointError(
                f"{where} gave no answer in {error.attempts} attempts, the last time: {error.problem}; see that it "
                f"runs, or set environment.config.customer=scripted"
            ) from error
        except StatusError as error:
            raise EndpointError(f"{where} refused: {error.problem}; correct {KEY}") from error
        self.messages.append({"role": "assistant", "content": answer.value})
        return answer.value


def instructions(facts: Customer) -> str:
    """Return the instructions of the model that plays the customer."""

    def wanted(wish: Wish) -> str:
        return WANTED[wish.kind].format(address=wish.address)

    return INSTRUCTIONS.format(
        item=facts.item,
        order_id=facts.order_id,
        postcode=facts.postcode,
        wish=wanted(facts.wishes[0]),
        change="".join(CHANGE.format(wish=wanted(wish)) for wish in facts.wishes[1:]),
        push=PUSH if facts.pushes else NO_PUSH,
    )


def read_reply(content: bytes) -> str:
    """Return the customer's words in an answer, at most `LONGEST` characters, without the model's thoughts.

    Raises:
        GarbledAnswerError: the answer is no chat completion, or has no words.
    """
    message = as_completion(content)["choices"][0]["message"]
    text = plain_text(message.get("content")).rpartition("</think>")[2].partition("<think>")[0].strip()
    if not text:
        raise GarbledAnswerError("the customer's model said nothing")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


_clients: dict[str, ChatClient] = {}
"""Client of each endpoint, by its settings: all episodes of a process share its budget and its connections."""
_lock = threading.Lock()


def client_of(settings: EndpointSettings) -> ChatClient:
    """Return the client with these settings."""
    key = canonical(asdict(settings))
    with _lock:
        if key not in _clients:
            budget = Budget(KEY, settings.price, settings.budget)
            address = Address(settings.model, settings.url)
            _clients[key] = ChatClient(address, settings, budget, "customer", largest=LARGEST)
        return _clients[key]
