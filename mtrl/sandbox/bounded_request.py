"""One HTTP request whose whole answer has a limit on its time and its size, whatever the server sends.

The time limits of HTTP clients hold for single reads, so a server can prolong its answer without end: by single bytes
of a header, or by one `100 Continue` after another. Here a timer shuts the connection down.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from mtrl.utils.http_client import ResponseTooLargeError, exception_message

CONNECT_SECONDS = 10.0
"""Time limit for a connection, in seconds."""


def send(
    request: httpx.Request, seconds: float, max_bytes: int, context: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    """Send a request on a connection of its own, and return the status and the body of the answer.

    Args:
        seconds: time limit of the connection, the request and the answer together, in seconds.
        max_bytes: maximum size of the body of the answer, in bytes.
        context: settings of TLS; None: the connection is not encrypted.

    Raises:
        TimeoutError: the answer was not complete in time.
        ConnectionError: there was no connection, or it ended without an answer; the message has the reason.
        ResponseTooLargeError: the body is larger than `max_bytes`.
    """
    url, deadline = request.url, time.monotonic() + seconds
    address = (url.host, url.port or (443 if url.scheme == "https" else 80))
    late = threading.Event()
    try:
        with (
            socket.create_connection(address, min(CONNECT_SECONDS, seconds)) as plain,
            _shut_down_at(deadline, plain, late),
        ):
            plain.settimeout(seconds)
            connected = plain if context is None else context.wrap_socket(plain, server_hostname=url.host)
            status, content = _exchange(request, connected, max_bytes + 1)
    except TimeoutError:
        late.set()
    except (OSError, http.client.HTTPException, ValueError) as error:
        if not late.is_set():
            raise ConnectionError(exception_message(error)) from error
    if late.is_set():
        raise TimeoutError(f"no complete answer within {seconds:g} s")
    if len(content) > max_bytes:
        raise ResponseTooLargeError(f"the answer is larger than {max_bytes:,} bytes")
    return status, content


@contextmanager
def _shut_down_at(deadline: float, connected: socket.socket, late: threading.Event) -> Iterator[None]:
    """Shut a connection down at a moment of `time.monotonic`, and set `late`, if the block lasts until then."""
    with connected.dup() as own:  # TLS takes the file descriptor of the other one

        def shut_down() -> None:
            late.set()
            with suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(0.0, deadline - time.monotonic()), shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _exchange(request: httpx.Request, connected: socket.socket, most_bytes: int) -> tuple[int, bytes]:
    """Return the status and at most `most_bytes` bytes of the body of the answer."""
    connection = http.client.HTTPConnection(request.url.host, request.url.port or 80)
    connection.sock = connected
    try:
        headers = {**request.headers, "Connection": "close"}
        connection.request(request.method, request.url.raw_path.decode("ascii"), request.read(), headers)
        with connection.getresponse() as response:
            return response.status, response.read(most_bytes)
    finally:
        connection.close()
