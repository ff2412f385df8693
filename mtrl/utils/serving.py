"""Common parts of mtrl's HTTP servers: which addresses other machines can reach, binding a socket, and running uvicorn
on it until a signal stops it."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable
from typing import Any

from mtrl.errors import UserError

MOST_CONNECTIONS = 512
"""Maximum number of connections of a server. Further ones are answered with status 503, after which clients retry."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host: a loopback address, also in brackets, or `localhost`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int, token: str | None, variable: str, option: str = "--{} {}") -> socket.socket:
    """Return a socket for the server, bound and not listening yet; port 0 selects a free port.

    Args:
        variable: name of the environment variable for the token, for error messages.
        option: format of an option's name and value in error messages.

    Raises:
        UserError: the address is invalid or not available, or other machines can reach it and no token protects it.
    """
    at_host, at_port = option.format("host", host), option.format("port", port)
    if not is_loopback(host) and not token:
        raise UserError(
            f"{at_host} can be reached from other machines and there is no token; set {variable} or use 127.0.0.1"
        )
    if not 0 <= port <= 65535:  # getaddrinfo reads 70000 as 4464
        raise UserError(f"{at_port} does not exist; choose one from 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UserError(f"{at_host} {at_port} is not available ({error}); choose another, or port 0") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Any, bound: socket.socket, when_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; requests in progress are answered before the server stops."""
    import uvicorn

    from mtrl.utils.http_protocol import PatientProtocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            when_ready()

    # Named explicitly, because "auto" depends on the packages that are installed.
    config = uvicorn.Config(
        app, http=PatientProtocol, loop="asyncio", ws="none", lifespan="off", log_level="warning", access_log=False,
        limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=10,
    )  # fmt: skip
    server = Server(config)

    def stop(*_: Any) -> None:
        server.should_exit = True

    # uvicorn's own handlers raise the signal again at the end, which would give the process an error status.
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
