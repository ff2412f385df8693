"""mtrl serve environment: an environment as a server of the Model Context Protocol, on standard input and output.

    mtrl serve environment experiment=gsm8k                    overrides as for mtrl train
    mtrl serve environment experiment=gsm8k row=3 split=test   starts at a row, by its id or its number
    mtrl serve environment out=FILE.jsonl                      saves the episodes; mtrl rescore reads them

An agent starts this program as its server. It offers the tools of the environment, start_episode and respond; each
call is a turn, and the end of an episode shows its reward and score. Messages for people are on standard error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec

import mtrl
from mtrl.command.program import run_program
from mtrl.errors import UserError, missing_extra
from mtrl.play.choices import choices_of, parse, prepared, split_words
from mtrl.play.served import RESPOND, START, ServedEpisodes

WITHOUT_EFFECT = ("player", "episodes")
"""Keys of `mtrl play` that a server refuses: its client is the player."""
INSTRUCTIONS = (
    f"One episode of a task at a time: call {START} and read the task, then call the other tools or {RESPOND} until a "
    "result says that the episode is over."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration, and serve one client until it closes standard input. Return the exit status."""
    args = parse("mtrl serve environment", __doc__, argv)
    own, overrides = split_words(args.overrides)
    if unused := [f"{key}={own[key]}" for key in WITHOUT_EFFECT if key in own]:
        raise UserError(f"{unused[0]} has no effect, because the client of the server is the player; remove it")
    if find_spec("mcp") is None:
        raise missing_extra("mcp", "mcp")
    choices = choices_of(own)
    config, task = prepared(overrides, args.config_dir)
    try:
        asyncio.run(serve(ServedEpisodes(config, task, choices)))
    except KeyboardInterrupt:
        return 130
    return 0


async def serve(episodes: ServedEpisodes) -> None:
    """Serve the episodes on standard input and output until the input ends."""
    from mcp import types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    async def list_tools(context: object, request: object) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[
                types.Tool(name=each["name"], description=each["description"], input_schema=each["parameters"])
                for each in await episodes.tools()
            ]
        )

    async def call_tool(context: object, request: types.CallToolRequestParams) -> types.CallToolResult:
        answer = await episodes.call(request.name, request.arguments or {})
        content = types.TextContent(type="text", text=answer.text)
        return types.CallToolResult(content=[content], is_error=answer.is_error)

    server = Server(
        "mtrl", version=mtrl.__version__, instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool
    )
    try:
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
    finally:
        await episodes.close()


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
