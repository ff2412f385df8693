"""A connection to an MCP server: one session, on the event loop of a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from mtrl.environments.tools import Tool, ToolError
from mtrl.errors import UserError
from mtrl.mcp.stdio_server import StdioServer

MAX_TOOLS = 128
"""Maximum number of tools of a server."""
MAX_SCHEMA_CHARACTERS = 200_000
"""Maximum size of the schemas of all tools of a server, in characters of JSON: the model reads them in every prompt."""
SECONDS_TO_CLOSE = 15.0
"""Maximum number of seconds that closing a connection blocks."""


class Connection:
    """A context manager: entering it starts the server or connects to it, exiting it ends the session and the server.

    The session is one of the protocol's initialize handshake, which every server has and which may hold the state of
    an episode.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], url: str, timeout: float):
        """
        Args:
            command: program and arguments of a server on standard input and output; empty: `url` counts.
            env: environment variables for `command`.
            url: address of a server on streamable HTTP.
            timeout: maximum number of seconds until the server has listed its tools.
        """
        self.name = f"the MCP server {' '.join(command) or url}"
        self.tools: list[Tool] = []
        self._server: StdioServer | str = StdioServer(command, env) if command else url
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def __enter__(self) -> Connection:
        """Start the server or connect to it, and list its tools.

        Raises:
            UserError: the server does not start or answer, or has too many tools.
        """
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self._thread.join(SECONDS_TO_CLOSE)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(SECONDS_TO_CLOSE)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool, from any event loop, and return its text; without text, its structured content as JSON.

        Raises:
            ToolError: the server answers with an error, or with a content that is no text.
            UserError: the server can answer no more.
        """
        call = self._call(name, arguments)
        try:
            result = asyncio.run_coroutine_threadsafe(call, self._loop)
        except RuntimeError:  # the session has ended, and its event loop with it
            call.close()
            raise self._failure(ConnectionError("the session has ended")) from None
        return await asyncio.wrap_future(result)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED and not self._problem:
                raise ToolError(str(error)) from error
            raise self._failure(error) from error
        text = _text(name, result)
        if result.is_error:
            raise ToolError(text)
        return text

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._session())
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(self._failure(error))

    async def _session(self) -> None:
        from mcp import Client

        async with asyncio.timeout(self._timeout) as limit, Client(self._server, mode="legacy", cache=None) as client:
            self._client, self.tools = client, await self._list(client)
            limit.reschedule(None)
            self._opened.set_result(None)
            await self._closing.wait()

    async def _list(self, client: Any) -> list[Tool]:
        tools: list[Tool] = []
        cursor, size = None, 0
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [self._tool(each) for each in page.tools]
            size += sum(len(json.dumps(each.input_schema)) + len(each.description or "") for each in page.tools)
            if len(tools) > MAX_TOOLS or size > MAX_SCHEMA_CHARACTERS:
                raise UserError(
                    f"{self.name} has more than {MAX_TOOLS} tools or {MAX_SCHEMA_CHARACTERS} characters of schemas; "
                    "use a server with fewer tools"
                )
            cursor = page.next_cursor
            if not cursor or not page.tools:
                return tools

    def _tool(self, offered: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            return await self.call(offered.name, arguments)

        function = {
            "name": offered.name,
            "description": offered.description or offered.title or offered.name,
            "parameters": offered.input_schema,
        }
        return Tool(offered.name, {"type": "function", "function": function}, call)

    @property
    def _problem(self) -> str:
        return self._server.problem if isinstance(self._server, StdioServer) else ""

    def _failure(self, error: BaseException) -> UserError:
        """Return the sentence about a server that can answer no more."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, UserError):
            return error
        if self._problem:
            return UserError(f"{self.name} {self._problem}")
        if isinstance(error, TimeoutError):
            return UserError(f"{self.name} did not list its tools within {self._timeout:g} s")
        return UserError(f"{self.name} cannot be reached ({type(error).__name__}: {error})")


def _text(name: str, result: Any) -> str:
    from mcp.types import TextContent

    others = sorted({each.type for each in result.content if not isinstance(each, TextContent)})
    if others:
        raise ToolError(f"{name} returned content that is no text ({', '.join(others)})")
    text = "\n".join(each.text for each in result.content)
    if not text and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return text
