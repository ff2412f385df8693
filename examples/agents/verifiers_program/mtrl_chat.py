"""A harness of verifiers that runs its loop in this process: the policy answers, its tool calls run, and it goes on.

verifiers' own chat harness starts a Python process for every episode, whose imports take longer than most episodes.
This module runs in verifiers' interpreter, and imports nothing of mtrl.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

LIMITS = ("context_length_exceeded", "max_calls")
"""Codes of the gateway's refusals that end a conversation, which is then scored as it is."""


class ChatHarnessConfig(HarnessConfig):
    """The settings that every harness has."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Chat completions with the environment's tools, until the first message without a tool call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Run one segment of the conversation; see verifiers' `Harness.launch`."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            # Certificates take 20 ms to load, and are only needed for https.
            verify = endpoint.startswith("https:")
            http = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, trust_env=False, verify=verify, headers=headers)
            )
            body = {"model": ctx.model, "messages": self._opening(data), **({"tools": schemas} if schemas else {})}
            while True:
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if response.is_error:
                    return _refused(response)
                message = response.json()["choices"][0]["message"]
                body["messages"].append({name: value for name, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    content = await _result(call["function"], dispatch, connections)
                    answer = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    body["messages"].append({**answer, "content": content})

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or ())]


async def _result(function: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """Return the content of a tool's message; a mistake of the model becomes an error message."""
    name = function["name"]
    if name not in dispatch:
        return f"error: there is no tool {name!r}; the tools are {', '.join(sorted(dispatch)) or 'none'}"
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the arguments are a JSON {type(arguments).__name__}; they must be an object"
    return await call_mcp(connections, dispatch, name, arguments)


def _refused(response: httpx.Response) -> ProgramResult:
    """Return the result of a program whose call was refused: status 0 if a limit of the run ended the conversation."""
    ended = any(code in response.text for code in LIMITS)
    return ProgramResult(exit_code=0 if ended else 1, stdout="", stderr="" if ended else response.text)
