"""JSON requests to a server that may be slow, broken, hostile or unreachable."""

import asyncio
import gzip
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.engines.server import http
from mtrl.engines.server.http import Http
from mtrl.engines.server.process import free_port
from mtrl.engines.server.server_api import ServerBusyError, ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.errors import UserError

TOKEN = "secret-token-0123456789"


class Handler(BaseHTTPRequestHandler):
    """Answers with `server.answer` of the test: status, content type, bytes."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self.server.received.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
        self.server.connections.add(self.client_address)
        status, kind, content = self.server.answer(self)
        if status is None:
            self.close_connection = True
            return
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.received, self.connections = [], set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def replies(self, status, content=b"", kind="application/json"):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answer = lambda handler: (status, kind, content)

    def handle_error(self, *_):
        pass


@pytest.fixture(scope="module")
def running():
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(running):
    running.received.clear()
    running.connections.clear()
    return running


def ask(url, *words, token=TOKEN, seconds=5.0, **more):
    async def once():
        client = Http(url, token)
        try:
            return await client.request(*(words or ("POST", "/do")), seconds=seconds, **more)
        finally:
            await client.close()

    return asyncio.run(once())


def test_json_is_sent_with_the_token_and_parsed(server):
    server.replies(200, {"ids": [1, 2]})
    assert ask(f"{server.url}/", "POST", "/do", {"a": [3]}, params={"mode": "keep", "clear": False}) == {"ids": [1, 2]}
    ((method, path, headers, body),) = server.received
    assert (method, path, json.loads(body)) == ("POST", "/do?mode=keep&clear=false", {"a": [3]})
    assert headers["Authorization"] == f"Bearer {TOKEN}" and headers["Content-Type"] == "application/json"


def test_no_token_and_no_body(server):
    server.replies(200, True)
    assert ask(server.url, "GET", "/ping", token=None) is True
    ((_, _, headers, body),) = server.received
    assert "Authorization" not in headers and body == b""


@pytest.mark.parametrize(("content", "kind"), [(b"", "application/json"), (b"ok 1", "text/plain"), (b"7", None)])
def test_an_answer_without_json_is_none(server, content, kind):
    server.replies(200, content, kind)
    assert ask(server.url) is None


@pytest.mark.parametrize("content", [b"{", b"[" * 200_000, b"\xff\xfe"])
def test_broken_json_is_an_error(server, content):
    server.replies(200, content)
    with pytest.raises(ServerError, match="POST .*/do: the answer is broken JSON"):
        ask(server.url)


@given(st.integers(300, 599).filter(lambda status: status != 304))  # which has no body
@settings(max_examples=40, deadline=None)
def test_statuses_become_errors(running, status):
    running.replies(status, {"error": {"message": "no such thing"}})
    with pytest.raises(ServerError, match=f"POST .*/do: HTTP {status} no such thing") as caught:
        ask(running.url)
    is_final = status < 500 and status not in (408, 409, 425, 429)
    kind = ServerBusyError if status in (429, 503) else ServerRefusedError if is_final else ServerError
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"error": "unknown field"}, "unknown field"),
        ({"object": "error", "message": "bad"}, "bad"),
        ({"success": False, "message": "flush failed"}, "flush failed"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body", "ids"], "msg": "Field required"}]}, '[{"loc": ["body", "ids"], "msg": '),
        ([1, 2], "[1, 2]"),
        (b"Internal\nServer Error", "Internal Server Error"),
        (b"[" * 100_000, "[[[["),
        (b"", ""),
    ],
)
def test_the_message_of_a_server_is_part_of_the_error(server, body, words):
    server.replies(500, body)
    with pytest.raises(ServerError) as caught:
        ask(server.url)
    assert f"HTTP 500 {words}".strip() in str(caught.value)


def test_an_error_is_one_short_line_without_the_token(server):
    server.replies(400, {"message": f"{'x' * 140}{TOKEN}\n\x1b[31m{'y' * 10_000}"})
    with pytest.raises(ServerRefusedError) as caught:
        ask(server.url)
    message = str(caught.value)
    assert TOKEN not in message and TOKEN[:8] not in message and "***" in message
    assert len(message) < 450 and message.isprintable()


def test_a_refused_connection_is_unreachable():
    with pytest.raises(ServerUnreachableError, match="GET http://127.0.0.1:.*/ping: ConnectError"):
        ask(f"http://127.0.0.1:{free_port()}", "GET", "/ping")


def test_a_broken_connection_is_unreachable(server):
    server.answer = lambda handler: (None, None, b"")
    with pytest.raises(ServerUnreachableError, match="RemoteProtocolError"):
        ask(server.url)


def test_the_timeout_covers_a_slow_answer(server):
    is_sent = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.05)
        is_sent.set()
        return None, None, b""

    server.answer = drip
    with pytest.raises(ServerUnreachableError, match="no answer within 0.3 s"):
        ask(server.url, seconds=0.3)
    assert not is_sent.is_set()


def test_a_timeout_of_the_caller_is_raised_unchanged(server):
    server.answer = lambda handler: (time.sleep(2), (200, None, b""))[1]

    async def outside():
        client = Http(server.url, None)
        async with asyncio.timeout(0.2):
            await client.request("GET", "/slow", seconds=60)

    with pytest.raises(TimeoutError):
        asyncio.run(outside())


def test_the_size_of_an_answer_is_limited(server, monkeypatch):
    monkeypatch.setattr(http, "LARGEST", 1000)
    server.replies(200, b" " * 1001)
    with pytest.raises(ServerError, match="larger than 1,000 bytes"):
        ask(server.url)
    server.replies(200, b"1" + b" " * 999)
    assert ask(server.url) == 1


def test_compressed_answers_are_not_decompressed(server):
    """An answer of a megabyte of zeros would fit into a kilobyte."""
    server.replies(200, gzip.compress(b" " * 2**20 + b"1"))
    with pytest.raises(ServerError, match="broken JSON"):
        ask(server.url)
    assert server.received[0][2]["Accept-Encoding"] == "identity"


def test_proxies_of_the_environment_are_ignored(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    server.replies(200, 1)
    assert ask(server.url) == 1


def test_concurrent_requests_do_not_wait_for_each_other(server):
    count = 120  # more than the 100 connections of a client of httpx by default
    everyone = threading.Barrier(count)

    def together(handler):
        everyone.wait(30)
        return 200, "application/json", handler.path[1:].encode()

    server.answer = together

    async def all_of_them():
        client = Http(server.url, TOKEN)
        answers = await asyncio.gather(*(client.request("GET", f"/{i}", seconds=30) for i in range(count)))
        await client.close()
        return answers

    assert asyncio.run(all_of_them()) == list(range(count))


def test_the_client_works_on_consecutive_event_loops(server):
    server.replies(200, 1)
    client = Http(server.url, TOKEN)

    async def twice():
        return [await client.request("GET", "/", seconds=5) for _ in range(2)]

    async def last():
        assert await twice() == [1, 1]
        await client.close()
        await client.close()
        assert await twice() == [1, 1]  # and open again
        await client.close()

    assert asyncio.run(twice()) == [1, 1]
    assert len(server.connections) == 1, "a connection is used again"
    asyncio.run(last())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://[::1"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ServerRefusedError, match=r"GET .*/ping: "):
        ask(url, "GET", "/ping")


@pytest.mark.parametrize("token", ["two words", "new\nline", "é"])
def test_a_token_that_is_no_header_value_is_refused(token):
    with pytest.raises(UserError, match="printable ASCII without spaces") as caught:
        Http("http://127.0.0.1:1", token)
    assert token not in str(caught.value)


def test_a_stopped_server_times_out():
    """The server never accepts connections, and a large request fills the buffers of the kernel."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ServerUnreachableError, match="within 0.2 s"),
    ):
        ask(f"http://127.0.0.1:{listener.getsockname()[1]}", "POST", "/do", {"ids": [1] * 2**20}, seconds=0.2)
