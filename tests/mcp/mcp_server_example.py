"""A server of the Model Context Protocol for the tests: a counter, and tools that misbehave."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("example")
count = 0


@server.tool()
def add(number: int) -> str:
    """Add a number to the counter."""
    global count
    count += number
    return f"the count is {count}"


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable of the server."""
    return os.environ.get(name, "(none)")


@server.tool()
def refuse() -> str:
    """Fail."""
    raise ValueError("the shop is closed")


@server.tool()
def picture() -> Image:
    """Return an image."""
    return Image(data=b"1234", format="png")


@server.tool()
def die() -> str:
    """End the server."""
    print("out of ink", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
