"""The retriever server as a process: concurrent requests, hostile requests, tokens, and its end."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from mtrl.retrieval import Passage, RetrieverError, make_retriever
from mtrl.retrieval.passage import document_of

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, str(ROOT / "scripts" / "retriever_server.py")]
PASSAGES = [
    Passage(str(number), f"Bridge {number}", f"Bridge {number} of {('iron', 'stone', 'wood')[number % 3]} is old.")
    for number in range(200)
]

pytestmark = pytest.mark.xdist_group("retriever_server")  # which share a server


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name != "MTRL_RETRIEVER_TOKEN"}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def is_ready(url):
    """Whether the server at `url` answers that it is healthy."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "bridges.jsonl"
    path.write_text("".join(json.dumps({"id": one.id, "contents": one.contents}) + "\n" for one in PASSAGES))
    return path


@contextmanager
def running(corpus, *words, **more):
    """Start a server, and yield its address, its process, and its first line of output."""
    command = [*COMMAND, "--corpus", str(corpus), "--port", "0", *words]
    with subprocess.Popen(
        command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("ready "), process.stderr.read()
            yield line.split()[1], process, line
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(corpus):
    with running(corpus) as (url, _, line):
        assert line == f"ready {url} (200 passages, bm25)\n"
        yield url


def send(url, body, method="POST", path="/retrieve", **headers):
    """Send bytes by a connection of their own, and return the status and the text of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def ask(url, **request):
    status, text = send(url, json.dumps(request).encode())
    assert status == 200, text
    return json.loads(text)["result"]


def test_answers_are_those_of_the_retriever_in_process(server):
    queries = ["stone bridge 7", "wood", "", "nothing of it"]
    expected = make_retriever("bm25", PASSAGES).search(queries, 3)
    assert make_retriever("server", url=server).search(queries, 3) == expected
    assert ask(server, queries=queries, return_scores=True) == [
        [{"document": document_of(hit.passage), "score": hit.score} for hit in hits] for hits in expected
    ]
    assert ask(server, query=queries[0], topk=None) == [[document_of(hit.passage) for hit in expected[0]]]
    assert len(ask(server, query="bridge", topk=100)[0]) == 100


def test_health(server):
    assert is_ready(server)
    status, text = send(server, None, "GET", "/health")
    assert (status, json.loads(text)) == (200, {"status": "ok", "passages": 200, "retriever": "bm25"})


def at_once(works):
    """Return the results of calls that start at the same time, each in its own thread."""
    results, start = [None] * len(works), threading.Barrier(len(works))

    def work(index):
        start.wait()
        results[index] = works[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_hundred_at_once_on_connections_of_their_own(server):
    queries = [f"bridge {number} of stone" for number in range(200)]
    expected = make_retriever("bm25", PASSAGES).search(queries, 2)
    results = at_once([lambda query=query: ask(server, queries=[query], topk=2) for query in queries])
    assert results == [[[document_of(hit.passage) for hit in hits]] for hits in expected]


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_two_hundred_threads_of_one_client(corpus, kind):
    queries = [f"bridge {number} of stone" for number in range(200)]
    expected = make_retriever(kind, PASSAGES).search(queries, 5)
    with running(corpus, "--retriever", kind) as (url, _, line):
        assert line.endswith(f"(200 passages, {kind})\n")
        retriever = make_retriever("server", url=url)
        assert at_once([lambda query=query: retriever.search([query], 5)[0] for query in queries]) == expected


HOSTILE = {
    "1 MB query": (json.dumps({"query": "bridge " * 150_000}).encode(), 200),
    "1 MB word": (json.dumps({"query": "b" * 2**20}).encode(), 200),
    "NUL": (b'{"query": "bridge\\u0000 7"}', 200),
    "lone surrogates": (b'{"queries": ["\\ud800", "\\udfff bridge"], "return_scores": true}', 200),
    "empty": (b"", 422),
    "malformed": (b'{"query": "bridge"', 422),
    "raw NUL": (b"\0" * 1000, 422),
    "not UTF-8": (b'{"query": "\xff\xfe"}', 422),
    "nested lists": (b"[" * 500_000, 422),
    "nested objects": (b'{"query":' * 200_000, 422),
    "nested queries": (b'{"queries": ' + b"[" * 500 + b"]" * 500 + b"}", 422),
    "long number": (b'{"query": "a", "topk": ' + b"9" * 10**5 + b"}", 422),
    "too many queries": (json.dumps({"queries": ["a"] * 1025}).encode(), 422),
    "wrong type": (b'{"query": {"$gt": ""}}', 422),
    "topk": (b'{"query": "a", "topk": 1000000000}', 422),
    "too large": (b'{"query": "' + b"a" * 9 * 2**20 + b'"}', 413),
}


@pytest.mark.parametrize("body, expected", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_requests_are_answered_and_forgotten(server, body, expected):
    status, text = send(server, body)
    assert status == expected
    if status != 200:
        (sentence,) = json.loads(text).values()
        assert 10 < len(sentence) < 100 and "\n" not in sentence
    assert ask(server, query="bridge 7", topk=1)[0][0]["id"] == "7"


def test_other_methods_and_paths_are_refused(server):
    assert send(server, None, "GET", "/retrieve")[0] == 405
    assert send(server, b"{}", "POST", "/health")[0] == 405
    for path in ("/", "/docs", "/openapi.json", "/../../etc/passwd"):
        assert send(server, None, "GET", path)[0] == 404


def test_incomplete_requests_block_no_other_client(server):
    address = urlsplit(server)
    half = b"POST /retrieve HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{"
    waiting = [socket.create_connection((address.hostname, address.port)) for _ in range(50)]
    try:
        for number, connection in enumerate(waiting):
            connection.sendall(half if number % 2 else b"\0\xff GET nonsense\r\n\r\n")
        assert ask(server, query="bridge 7", topk=1)[0][0]["id"] == "7"
    finally:
        for connection in waiting:
            connection.close()
    assert ask(server, query="bridge 7", topk=1)[0][0]["id"] == "7"


def test_a_configured_token_is_required(corpus):
    with running(corpus, "--host", "0.0.0.0", MTRL_RETRIEVER_TOKEN="sesame") as (url, _, _):
        url = url.replace("0.0.0.0", "127.0.0.1")
        body = b'{"query": "bridge 7"}'
        for header in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}, {"Authorization": "\xff"}):
            status, text = send(url, body, **header)
            assert status == 401 and "MTRL_RETRIEVER_TOKEN" in json.loads(text)["detail"]
        assert send(url, body, Authorization="Bearer sesame")[0] == 200
        with pytest.raises(RetrieverError, match="HTTP 401: .*the token is missing or wrong"):
            make_retriever("server", url=url, token="wrong").search(["a"], 1)
        assert make_retriever("server", url=url, token="sesame").search(["bridge 7"], 1)[0]
        assert is_ready(url)


def test_sigterm_completes_running_requests(corpus):
    body = b'{"query": "bridge 7", "topk": 1}'
    head = f"POST /retrieve HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with running(corpus) as (url, process, _):
        address = urlsplit(url)
        with (
            socket.create_connection((address.hostname, address.port)) as gone,
            socket.create_connection((address.hostname, address.port)) as late,
        ):
            gone.sendall(head)
            gone.close()
            late.sendall(head + body[:10])
            assert ask(url, query="bridge")  # by now it has seen the other two
            process.send_signal(signal.SIGTERM)
            while is_ready(url):
                time.sleep(0.05)
            late.sendall(body[10:])
            response = http.client.HTTPResponse(late)
            response.begin()
            assert json.loads(response.read())["result"][0][0]["id"] == "7"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and not errors


WRONG = {
    "no corpus file": (["--corpus", "none.jsonl"], "none.jsonl cannot be read"),
    "open to others": (
        ["--host", "0.0.0.0"],
        "--host 0.0.0.0 can be reached from other machines and there is no token",
    ),
    "all of IPv6": (["--host", "::"], "--host :: can be reached from other machines"),
    "no such host": (["--host", "127.0.0.1.5", "--token", "a"], "is not available"),
    "no such port": (["--port", "70000"], "--port 70000 does not exist"),
    "topk": (["--topk", "0"], "--topk 0 must be from 1 to 100"),
    "encoder of bm25": (["--encoder", "hashing"], "--encoder has no effect with --retriever bm25"),
    "token": (["--token", "schlüssel"], "characters that no header can hold"),
}


@pytest.mark.parametrize("words, said", WRONG.values(), ids=WRONG.keys())
def test_errors_at_the_start_are_one_sentence(corpus, words, said, tmp_path):
    command = [*COMMAND, "--corpus", str(corpus), "--port", "0", *words]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said in line and "Traceback" not in done.stderr


def test_a_used_port_is_one_sentence(corpus, server):
    port = str(urlsplit(server).port)
    command = [*COMMAND, "--corpus", str(corpus), "--port", port]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"--port {port} is not available" in done.stderr


def test_a_missing_package_names_the_extra(corpus):
    program = (
        "import sys; sys.modules['faiss'] = None\n"
        "from mtrl.retrieval.__main__ import main\n"
        f"sys.exit(main(['--corpus', {str(corpus)!r}, '--port', '0', '--retriever', 'dense']))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "faiss is not installed; install it with: pip install 'mtrl-agents[search]'" in done.stderr


def test_a_failed_search_is_answered_and_the_server_continues():
    """The server runs in this process. The client must not get the traceback of a failing retriever."""
    from concurrent.futures import ThreadPoolExecutor

    from fastapi.testclient import TestClient

    from mtrl.retrieval.server import create_app

    class Broken:
        def search(self, queries, topk):
            raise MemoryError("secret")

    with ThreadPoolExecutor(1) as pool:
        client = TestClient(create_app(Broken(), 3, {}, None, pool))
        response = client.post("/retrieve", json={"query": "a"})
        assert response.status_code == 500 and "secret" not in response.text
        assert client.get("/health").status_code == 200
