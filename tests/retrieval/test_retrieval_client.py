"""The client of a retriever server, against a local server with configured failures."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mtrl.errors import UserError
from mtrl.retrieval import Hit, Passage, RetrieverError, make_retriever


def answer(body):
    """Return one hit per query, whose text is the query."""
    hits = [[{"document": {"id": "1", "contents": f"T\n{query}"}, "score": 0.5}] for query in body["queries"]]
    return 200, {"result": hits}


def status(code, content="{}"):
    return lambda body: (code, content)


def hang_up(body):
    return None


def dripping(body):
    """Send a byte of an answer every now and then, until the client has closed the connection."""

    def send(handler):
        handler.send_response(200)
        handler.send_header("content-length", "500")
        handler.end_headers()
        for _ in range(500):
            handler.wfile.write(b" ")
            time.sleep(0.02)

    return 200, send


def badly_compressed(body):
    def send(handler):
        handler.send_response(200)
        handler.send_header("content-encoding", "gzip")
        handler.send_header("content-length", "5")
        handler.end_headers()
        handler.wfile.write(b"plain")

    return 200, send


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.received.append((self.path, body, self.headers.get("authorization")))
            reply = self.server.replies.pop(0) if self.server.replies else answer
        self.reply(reply(body))

    def do_GET(self):
        with self.server.lock:
            self.server.received.append((self.path, None, self.headers.get("authorization")))
            reply = self.server.replies.pop(0) if self.server.replies else status(200)
        self.reply(reply(None))

    def reply(self, given):
        if given is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        code, value = given
        if callable(value):
            value(self)
            return
        content = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class FlakyServer(ThreadingHTTPServer):
    """A server that sends its `replies` in order, and then correct answers."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.received, self.lock = [], [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_):
        pass


@pytest.fixture
def flaky():
    server = FlakyServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of the client in seconds; it does not sleep."""
    pauses, sleep, client = [], time.sleep, threading.current_thread()

    def pause(seconds):  # other threads of this process, such as those of libraries, sleep as well
        pauses.append(seconds) if threading.current_thread() is client else sleep(seconds)

    monkeypatch.setattr("mtrl.retrieval.client.time.sleep", pause)
    return pauses


def test_requests_and_answers_of_a_search(flaky):
    retriever = make_retriever("server", url=flaky.url)
    assert retriever.search(["one", " ", "ünder \ud800\0"], 4) == [
        [Hit(Passage("1", "T", "one"), 0.5)],
        [],
        [Hit(Passage("1", "T", "ünder ?\0"), 0.5)],
    ]
    sent = {"queries": ["one", "ünder ?\0"], "topk": 4, "return_scores": True}
    assert flaky.received == [("/retrieve", sent, None)]
    retriever.close()


def test_blank_queries_send_no_request(flaky):
    assert make_retriever("server", url=flaky.url).search(["", " \n"], 4) == [[], []]
    assert not flaky.received


@pytest.mark.parametrize(
    "path, requested", [("", "/retrieve"), ("/", "/retrieve"), ("/retrieve", "/retrieve"), ("/a/", "/a/retrieve")]
)
def test_urls_with_and_without_the_path(flaky, path, requested):
    make_retriever("server", url=flaky.url + path).search(["one"], 1)
    assert flaky.received[0][0] == requested


def test_answers_without_scores_and_with_too_many_hits(flaky):
    flaky.replies = [lambda body: (200, {"result": [[{"contents": f"T\n{word}"} for word in "abc"]]})]
    (hits,) = make_retriever("server", url=flaky.url).search(["one"], 2)
    assert [(hit.passage.text, hit.score) for hit in hits] == [("a", 0.0), ("b", -1.0)]


def test_many_queries_are_sent_in_parts(flaky):
    queries = [f"q{number}" for number in range(600)]
    found = make_retriever("server", url=flaky.url).search(queries, 1)
    assert [hits[0].passage.text for hits in found] == queries
    assert [len(body["queries"]) for _, body, _ in flaky.received] == [256, 256, 88]


def test_failed_requests_are_retried_with_growing_pauses(flaky, pauses):
    flaky.replies = [status(500), hang_up, status(503, "busy")]
    retriever = make_retriever("server", url=flaky.url, backoff=0.25)
    assert retriever.search(["one"], 1)[0][0].passage.text == "one"
    assert pauses == [0.25, 0.5, 0.75]
    assert len(flaky.received) == 4


def test_the_error_after_all_retries_contains_the_last_answer(flaky, pauses):
    flaky.replies = [status(500), status(502), status(503, "too\n busy")]
    retriever = make_retriever("server", url=flaky.url, retries=2)
    with pytest.raises(RetrieverError) as caught:
        retriever.search(["one"], 1)
    assert str(caught.value) == (f"the retriever at {flaky.url}/retrieve answered HTTP 503: too busy, in 3 attempts")
    assert pauses == [1.0, 2.0]
    assert retriever.search(["two"], 1)[0][0].passage.text == "two"


@pytest.mark.parametrize("code", [301, 400, 401, 404, 413, 422, 429])
def test_refused_requests_are_not_retried(flaky, pauses, code):
    flaky.replies = [status(code, '{"detail": "topk must be less"}')]
    with pytest.raises(RetrieverError, match=rf"{flaky.url}/retrieve answered HTTP {code}: .*topk must be less"):
        make_retriever("server", url=flaky.url).search(["one"], 1)
    assert len(flaky.received) == 1 and not pauses


def test_malformed_answers_are_not_retried(flaky, pauses):
    flaky.replies = [status(200, "<html>")]
    with pytest.raises(RetrieverError, match="an answer of another form: the answer is not JSON"):
        make_retriever("server", url=flaky.url).search(["one"], 1)
    assert len(flaky.received) == 1 and not pauses


def test_an_unreachable_server_is_an_error_after_the_retries(pauses):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # the socket does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RetrieverError, match=rf"{url}/retrieve could not be reached .*, in 3 attempts"):
            make_retriever("server", url=url, retries=2).search(["one"], 1)
    assert pauses == [1.0, 2.0]


def test_a_silent_server_is_an_error_after_the_time_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(RetrieverError, match="ReadTimeout"):
            make_retriever("server", url=url, retries=1, timeout=0.1, backoff=0.01).search(["one"], 1)
    assert time.monotonic() - start > 0.2


def test_an_answer_that_does_not_end_is_an_error_after_the_time_limit(flaky):
    """Each part comes in time, and the whole answer would not come in less than 10 s."""
    flaky.replies = [dripping]
    with pytest.raises(RetrieverError, match="the answer did not end within 0.1 s"):
        make_retriever("server", url=flaky.url, retries=0, timeout=0.1).search(["one"], 1)


def test_an_answer_has_a_size_limit(flaky, monkeypatch):
    monkeypatch.setattr("mtrl.retrieval.client.LARGEST_ANSWER", 20)
    with pytest.raises(RetrieverError, match=f"the answer of the retriever at {flaky.url}/retrieve exceeds 20 bytes"):
        make_retriever("server", url=flaky.url).search(["one"], 1)
    assert len(flaky.received) == 1


def test_a_badly_compressed_answer_is_an_error_after_the_retries(flaky, pauses):
    """A tool passes other errors on to the policy as an observation."""
    flaky.replies = [badly_compressed] * 2
    with pytest.raises(RetrieverError, match="DecodingError: .*, in 2 attempts"):
        make_retriever("server", url=flaky.url, retries=1).search(["one"], 1)


def test_threads_share_the_retriever(flaky):
    retriever = make_retriever("server", url=flaky.url)
    found = {}

    def ask(number):
        found[number] = retriever.search([f"q{number}"], 1)[0][0].passage.text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"q{number}" for number in range(100)}


def test_the_token_is_sent(flaky, monkeypatch):
    monkeypatch.setenv("MTRL_RETRIEVER_TOKEN", "from-outside\n")
    make_retriever("server", url=flaky.url).search(["one"], 1)
    make_retriever("server", url=flaky.url, token="given").search(["one"], 1)
    assert [token for _, _, token in flaky.received] == ["Bearer from-outside", "Bearer given"]
    with pytest.raises(UserError, match="MTRL_RETRIEVER_TOKEN. has characters"):
        make_retriever("server", url=flaky.url, token="schlüssel")


def test_no_proxy_is_used_for_this_machine(flaky, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert make_retriever("server", url=flaky.url, retries=0).search(["one"], 1)[0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"url": "localhost:8000"}, "url=localhost:8000 is no address; write http://host:port"),
        ({"url": "http://"}, "is no address"),
        ({"url": "http://me:secret@host"}, "is no address"),
        ({"url": "http://host/retrieve?topk=3"}, "is no address"),
        ({"url": 3}, "url=3 is no address"),
        ({"url": "http://host", "timeout": 0}, "timeout=0 must be more than 0"),
        ({"url": "http://host", "retries": -1}, "retries=-1"),
        ({"url": "http://host", "top_k": 3}, "has no option 'top_k'; it has timeout, retries, token, backoff"),
        ({}, "retriever=server needs url"),
    ],
)
def test_wrong_options_are_user_errors(options, message):
    with pytest.raises(UserError, match=message):
        make_retriever("server", **options)
