"""JSON to a server that may be slow, broken, hostile or gone."""

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
from mtrl.engines.server.api import ServerBusyError, ServerError, ServerGoneError, ServerRefusedError
from mtrl.engines.server.http import Http, said_in
from mtrl.engines.server.process import free_port
from mtrl.errors import UserError

TOKEN = "secret-token-0123456789"


class Handler(BaseHTTPRequestHandler):
    """Answers with whatever the test has put into `server.answer`: status, content type, bytes."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self.server.heard.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
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
        self.heard, self.connections = [], set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def says(self, status, content=b"", kind="application/json"):
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
    running.heard.clear()
    running.connections.clear()
    return running


def ask(url, *words, token=TOKEN, seconds=5.0, **more):
    async def once():
        client = Http(url, token)
        try:
            return await client.ask(*(words or ("POST", "/do")), seconds=seconds, **more)
        finally:
            await client.close()

    return asyncio.run(once())


def test_json_goes_out_with_the_token_and_comes_back(server):
    server.says(200, {"ids": [1, 2]})
    assert ask(f"{server.url}/", "POST", "/do", {"a": [3]}, params={"mode": "keep", "clear": False}) == {"ids": [1, 2]}
    ((method, path, headers, body),) = server.heard
    assert (method, path, json.loads(body)) == ("POST", "/do?mode=keep&clear=false", {"a": [3]})
    assert headers["Authorization"] == f"Bearer {TOKEN}" and headers["Content-Type"] == "application/json"


def test_no_token_and_no_body(server):
    server.says(200, True)
    assert ask(server.url, "GET", "/ping", token=None) is True
    ((_, _, headers, body),) = server.heard
    assert "Authorization" not in headers and body == b""


@pytest.mark.parametrize(("content", "kind"), [(b"", "application/json"), (b"ok 1", "text/plain"), (b"7", None)])
def test_what_is_no_json_is_none(server, content, kind):
    server.says(200, content, kind)
    assert ask(server.url) is None


@pytest.mark.parametrize("content", [b"{", b"[" * 200_000, b"\xff\xfe"])
def test_broken_json_is_an_error(server, content):
    server.says(200, content)
    with pytest.raises(ServerError, match="POST .*/do: the answer is broken JSON"):
        ask(server.url)


@given(st.integers(300, 599).filter(lambda status: status != 304))  # which has no body
@settings(max_examples=40, deadline=None)
def test_what_a_status_means(running, status):
    running.says(status, {"error": {"message": "no such thing"}})
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
def test_the_words_of_a_server_are_found(server, body, words):
    server.says(500, body)
    with pytest.raises(ServerError) as caught:
        ask(server.url)
    assert f"HTTP 500 {words}".strip() in str(caught.value)


@given(st.binary(max_size=200) | st.recursive(st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
@settings(deadline=None)
def test_any_body_of_an_error_has_words(body):
    assert isinstance(said_in(body if isinstance(body, bytes) else json.dumps(body).encode()), str)


def test_an_error_is_one_short_line_without_the_token(server):
    server.says(400, {"message": f"{'x' * 140}{TOKEN}\n\x1b[31m{'y' * 10_000}"})
    with pytest.raises(ServerRefusedError) as caught:
        ask(server.url)
    told = str(caught.value)
    assert TOKEN not in told and TOKEN[:8] not in told and "***" in told
    assert len(told) < 450 and told.isprintable()


def test_nobody_listens():
    with pytest.raises(ServerGoneError, match="GET http://127.0.0.1:.*/ping: ConnectError"):
        ask(f"http://127.0.0.1:{free_port()}", "GET", "/ping")


def test_a_broken_connection(server):
    server.answer = lambda handler: (None, None, b"")
    with pytest.raises(ServerGoneError, match="RemoteProtocolError"):
        ask(server.url)


def test_the_whole_answer_has_a_time_limit_however_slowly_it_comes(server):
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.05)
        return None, None, b""

    server.answer = drip
    began = time.monotonic()
    with pytest.raises(ServerGoneError, match="no answer within 0.3 s"):
        ask(server.url, seconds=0.3)
    assert time.monotonic() - began < 5


def test_a_time_limit_from_outside_stays_the_callers(server):
    server.answer = lambda handler: (time.sleep(2), (200, None, b""))[1]

    async def outside():
        client = Http(server.url, None)
        async with asyncio.timeout(0.2):
            await client.ask("GET", "/slow", seconds=60)

    with pytest.raises(TimeoutError):
        asyncio.run(outside())


def test_the_size_of_an_answer_is_limited(server, monkeypatch):
    monkeypatch.setattr(http, "LARGEST", 1000)
    server.says(200, b" " * 1001)
    with pytest.raises(ServerError, match="larger than 1,000 bytes"):
        ask(server.url)
    server.says(200, b"1" + b" " * 999)
    assert ask(server.url) == 1


def test_nothing_is_unpacked(server):
    """An answer of a megabyte of zeros would fit into a kilobyte."""
    server.says(200, gzip.compress(b" " * 2**20 + b"1"))
    with pytest.raises(ServerError, match="broken JSON"):
        ask(server.url)
    assert server.heard[0][2]["Accept-Encoding"] == "identity"


def test_a_proxy_of_the_environment_is_not_asked(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    server.says(200, 1)
    assert ask(server.url) == 1


def test_many_are_asked_at_once_and_none_waits_for_another(server):
    count = 300
    everyone = threading.Barrier(count)

    def together(handler):
        everyone.wait(30)
        return 200, "application/json", handler.path[1:].encode()

    server.answer = together

    async def all_of_them():
        client = Http(server.url, TOKEN)
        answers = await asyncio.gather(*(client.ask("GET", f"/{i}", seconds=30) for i in range(count)))
        await client.close()
        return answers

    assert asyncio.run(all_of_them()) == list(range(count))


def test_one_event_loop_after_the_other(server):
    server.says(200, 1)
    client = Http(server.url, TOKEN)

    async def twice():
        return [await client.ask("GET", "/", seconds=5) for _ in range(2)]

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
def test_an_address_that_is_none(url):
    with pytest.raises(ServerRefusedError, match=r"GET .*/ping: "):
        ask(url, "GET", "/ping")


@pytest.mark.parametrize("token", ["two words", "new\nline", "é"])
def test_a_token_that_no_header_takes(token):
    with pytest.raises(UserError, match="printable ASCII without spaces") as caught:
        Http("http://127.0.0.1:1", token)
    assert token not in str(caught.value)


def test_a_server_that_is_stopped():
    """It never accepts, and a large request fills what the kernel keeps for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ServerGoneError, match="within 0.2 s"):
        ask(f"http://127.0.0.1:{listener.getsockname()[1]}", "POST", "/do", {"ids": [1] * 2**20}, seconds=0.2)
