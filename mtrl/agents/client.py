"""The client that a Python agent receives. Its requests to the policy belong to one trajectory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx

from mtrl.types import Message
from mtrl.utils.http_client import error_message, printable

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

NO_TIMEOUT = httpx.Timeout(None)
"""Time limit of a request: none, because the episode has one."""


class RefusedError(RuntimeError):
    """The gateway refused a request. `code` is the code of OpenAI's error, such as `context_length_exceeded` or
    `max_calls`."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message, self.code = status, message, code


class AgentClient:
    """Sends requests by plain HTTP. `openai()` and `async_openai()` return OpenAI's clients for the same trajectory.

    Example::

        async def run(row, client):
            message = await client.achat(row["prompt"])
            return float(message["content"] == row["ground_truth"]["answer"])
    """

    def __init__(self, base_url: str, api_key: str, model: str):
        """
        Args:
            base_url: address up to and including `/v1`.
            model: model name that the requests carry.
        """
        self.base_url, self.api_key, self.model = base_url, api_key, model
        self._sync: httpx.Client | None = None
        self._async: httpx.AsyncClient | None = None

    def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any) -> Message:
        """Return the policy's next message, which can be appended to `messages`.

        Args:
            tools: schemas in OpenAI's form.
            options: further fields of the request, such as `max_tokens` and `stop`.

        Raises:
            RefusedError: the request cannot be answered: too many calls, too long, malformed.
            RuntimeError: the method was called in an event loop, which it would block.
        """
        _require_no_event_loop("chat", "await client.achat(…)")
        if self._sync is None:
            self._sync = httpx.Client(timeout=NO_TIMEOUT, trust_env=False, verify=self.base_url.startswith("https:"))
        response = self._sync.post(self._url, json=self._body(messages, tools, options), headers=self._headers)
        return _message(response)

    async def achat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> Message:
        """`chat`, for async agents."""
        if self._async is None:
            verify = self.base_url.startswith("https:")
            self._async = httpx.AsyncClient(timeout=NO_TIMEOUT, trust_env=False, verify=verify)
        return _message(
            await self._async.post(self._url, json=self._body(messages, tools, options), headers=self._headers)
        )

    def openai(self) -> OpenAI:
        """Return OpenAI's client."""
        import openai as package

        _require_no_event_loop("openai", "client.async_openai()")
        http = package.DefaultHttpxClient(trust_env=False, verify=self.base_url.startswith("https:"))
        return package.OpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    def async_openai(self) -> AsyncOpenAI:
        """Return OpenAI's client for async agents."""
        import openai as package

        http = package.DefaultAsyncHttpxClient(trust_env=False, verify=self.base_url.startswith("https:"))
        return package.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=http)

    async def close(self) -> None:
        """Close the connections, when the agent is done."""
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            await self._async.aclose()

    @property
    def _url(self) -> str:
        return f"{self.base_url}/chat/completions"

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def _body(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        return {"model": self.model, "messages": messages, **({"tools": tools} if tools else {}), **options}


def _message(response: httpx.Response) -> Message:
    """Return the assistant's message of a response.

    Raises:
        RefusedError: the response holds no message.
    """
    try:
        content = response.json()
        if response.is_success:
            return content["choices"][0]["message"]
        code = content["error"].get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        code = None
    raise RefusedError(response.status_code, printable(error_message(response.content)), code)


def _require_no_event_loop(name: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"client.{name} would block the event loop that the policy answers on; write {instead}")
