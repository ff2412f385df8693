"""Requests end at their limits; `test_swerex_container.py` has more hostile answers."""

import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from mtrl.sandbox.bounded_request import send
from mtrl.utils.http_client import ResponseTooLargeError

ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello"


@contextmanager
def listener(answer, host="127.0.0.1"):
    """The port of a server that calls `answer` with its first connection."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def serve():
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(2**16)
            answer(connection)

    with socket.create_server((host, 0), family=family) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_is_returned_with_its_status(host):
    shown = f"[{host}]" if ":" in host else host
    try:
        with listener(lambda connection: connection.sendall(ANSWER), host) as port:
            assert send(httpx.Request("GET", f"http://{shown}:{port}/x"), 20, 5) == (404, b"hello")
    except OSError:
        if host == "127.0.0.1":
            raise
        pytest.skip("this machine has no IPv6")


def test_an_answer_that_is_too_large_and_a_missing_answer_are_errors():
    with listener(lambda connection: connection.sendall(ANSWER)) as port, pytest.raises(ResponseTooLargeError):
        send(httpx.Request("GET", f"http://127.0.0.1:{port}"), 20, 4)
    with listener(lambda connection: None) as port, pytest.raises(ConnectionError, match="RemoteDisconnected"):
        send(httpx.Request("GET", f"http://127.0.0.1:{port}"), 20, 4)
    with pytest.raises(ConnectionError, match="ConnectionRefusedError"):
        send(httpx.Request("GET", f"http://127.0.0.1:{port}"), 20, 4)


def _drip_a_record(connection):
    """Send the first record of a TLS handshake a byte at a time."""
    connection.sendall(b"\x16\x03\x03\x40\x00\x02")
    for _ in range(400):
        connection.sendall(b"\x00")
        time.sleep(0.05)


def test_a_handshake_of_tls_ends_at_the_time_limit():
    """The server goes on for 20 s, and the request gives up before."""
    with listener(_drip_a_record) as port, pytest.raises(TimeoutError, match=r"no complete answer within 0.3 s"):
        send(httpx.Request("GET", f"https://127.0.0.1:{port}"), 0.3, 4, ssl.create_default_context())
