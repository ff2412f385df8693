"""Environments whose tools come from a server of the Model Context Protocol (MCP)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from mtrl.environments.tools import NAME, ToolEnvironment, toolbox
from mtrl.errors import UserError, missing_extra
from mtrl.mcp.connection import Connection
from mtrl.types import Message, Row


class McpEnvironment(ToolEnvironment):
    """An environment that offers the tools of an MCP server; a subclass defines `answer`.

    A server with a `command` runs for one episode, and all its processes end with the episode or with this process. A
    server with a `url` is shared; every episode has a session of its own. A server that ends or breaks the protocol
    fails the episode.

    Example::

        class Notes(McpEnvironment):
            def answer(self, response, ground_truth):
                return float(response.strip() == ground_truth["answer"]), None, True
    """

    def __init__(
        self,
        max_turns: int = 5,
        command: Sequence[str] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        offered_tools: Sequence[str] | None = None,
        start_timeout: float = 30.0,
        **config: Any,
    ):
        """
        Args:
            command: program and arguments of a server on standard input and output.
            url: address of a server on streamable HTTP, instead of `command`.
            env: environment variables for `command`, in addition to those of `mtrl.mcp.stdio_server.PASSED`.
            offered_tools: names of the tools that the model is offered; None: all tools of the server.
            start_timeout: maximum number of seconds until the server has listed its tools.

        Raises:
            UserError: a setting is invalid, or the package `mcp` is not installed.
        """
        super().__init__(max_turns, **config)
        _check(command, url, env)
        self.command, self.url, self.env = list(command), url, dict(env or {})
        self.offered_tools, self.start_timeout = offered_tools, start_timeout

    def reset(self, row: Row | None = None) -> list[Message] | None:
        """Start the server or connect to it, and add its tools to the toolbox.

        Raises:
            UserError: the server does not start, lacks a tool of `offered_tools`, or has an offered tool whose name no
                model can call.
        """
        opening = super().reset(row)
        connection = self.resources.enter_context(Connection(self.command, self.env, self.url, self.start_timeout))
        tools = {each.name: each for each in connection.tools}
        names = list(tools) if self.offered_tools is None else self.offered_tools
        if lacking := [name for name in names if name not in tools]:
            raise UserError(
                f"environment.config.offered_tools has {', '.join(lacking)}, and {connection.name} has only: "
                f"{', '.join(tools)}"
            )
        if wrong := next((name for name in names if not NAME.fullmatch(name)), None):
            raise UserError(
                f"{connection.name} has a tool named {wrong[:80]!r}, and a name may have 1 to 64 letters, digits, _ or "
                "-; name the other tools that the model is offered by environment.config.offered_tools"
            )
        self.toolbox = toolbox(self.toolbox, {name: tools[name] for name in names})
        return opening


def _check(command: Any, url: Any, env: Any) -> None:
    if find_spec("mcp") is None:
        raise missing_extra("mcp", "mcp")
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise UserError(f"environment.config.command={command!r} is no list of texts; write [PROGRAM, ARGUMENT]")
    if bool(command) == bool(url):
        raise UserError("environment.config needs either command or url of the MCP server; set exactly one of them")
    if url and not str(url).startswith(("http://", "https://")):
        raise UserError(f"environment.config.url={url!r} is no address; write http://HOST:PORT/mcp")
    if url and env:
        raise UserError("environment.config.env has no effect on a server with a url; remove it")
