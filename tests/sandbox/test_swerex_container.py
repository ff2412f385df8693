"""Remote containers: real servers of SWE-ReX, and servers that an agent has replaced."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from mtrl.errors import UserError
from mtrl.sandbox import swerex_container
from mtrl.sandbox.container import CommandResult, ContainerError, copy_out
from mtrl.sandbox.server_lease import lease
from mtrl.sandbox.swerex_client import LARGEST_ANSWER, SweRexClient, checked_url
from mtrl.sandbox.swerex_container import SweRexContainer, parse_result
from tests import forked
from tests.sandbox.swerex_servers import TOKEN, answers, need_swerex, server, until

COUNT = "pgrep -ax sleep | grep -c 'sleep {}$'"


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))


@need_swerex
def test_an_episode_on_a_real_server(own_cache, monkeypatch, tmp_path, caplog):
    """Commands, files and limits in one container, and a fresh container for the next episode."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "run.sh").write_text("#!/bin/bash\necho run in $PWD with $A\n")
    (tmp_path / "folder" / "run.sh").chmod(0o755)
    (tmp_path / "folder" / "link").symlink_to("run.sh")
    with server(monkeypatch) as url:
        container = SweRexContainer([url], "/app", 600)
        with pytest.raises(ContainerError, match="has not been started"):
            container.run("true", 5)
        container.start()
        assert lease(url) is None, "no other episode of this machine gets the server"
        first = container.run('echo "$A" > a.txt; echo out; echo err >&2; printf "\\377"; exit 3', 20, {"A": "it's"})
        assert (first.output, first.exit_code, first.stopped) == ("out\nerr\n\ufffd", 3, "")
        assert copy_out(container, "/app/a.txt") == "it's\n" and copy_out(container, "/app") is None
        assert container.run("mkdir /tests", 20).exit_code == 0
        container.copy_in(tmp_path / "folder", "/tests")
        assert container.run("/tests/link", 20, {"A": "x"}).output == "run in /app with x\n"
        with pytest.raises(ContainerError, match="cannot copy folder to /nothing"):
            container.copy_in(tmp_path / "folder", "/nothing")
        with pytest.raises(ContainerError) as hostile:
            container.copy_in(tmp_path / "folder", f"/\x1b[31m{TOKEN}")
        assert "\x1b" not in str(hostile.value).split(": ", 1)[1] and "***" in str(hostile.value)

        late = container.run("echo begun; sleep 100", 1)
        assert (late.output, late.exit_code, late.stopped) == ("begun\n", -1, "it took more than 1 s")
        much = container.run("yes", 20)
        assert len(much.output) == 2**20 and much.stopped == "it printed more than 1048576 bytes"
        begun = container.run("sleep 100 & echo begun", 20)
        assert (begun.output, begun.stopped) == ("begun\n", ""), "a command does not wait for what it began"
        assert container.run(COUNT.format(100), 20).output == "1\n", "which continues"
        killed = container.run("kill -9 $PPID", 20)
        assert (killed.exit_code, killed.stopped) == (-1, "the process that ran it ended with exit code -9")
        arguments = container.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", 20).output
        assert "--auth-token ***" in arguments and TOKEN not in arguments
        nul = container.run("echo \0", 20)
        assert (nul.output, nul.exit_code, nul.stopped) == ("embedded null byte\n", 126, "")
        assert container.run("rm -r /app", 20).exit_code == 0
        assert container.run("true", 20).exit_code == 126, "the working directory is missing"

        container.remove()
        container.remove()
        with pytest.raises(ContainerError, match="was removed"):
            container.run("true", 5)
        second = SweRexContainer([url], "/app", 600)
        second.start()
        assert second.run(f"ls /app; {COUNT.format(100)}", 20).output == "0\n"
        assert copy_out(second, "/app/a.txt") is None and copy_out(second, "/tests/run.sh") is None
        second.remove()
    assert TOKEN not in caplog.text


@need_swerex
def test_a_folder_that_cannot_be_made_is_the_reason_and_ends_no_server(own_cache, monkeypatch):
    monkeypatch.setattr(swerex_container, "WAIT_SECONDS", 1.0)
    with server(monkeypatch) as url:
        until(lambda: answers(url))
        with pytest.raises(ContainerError, match="within 1 s: the server .* cannot make the folder /proc/app, or has"):
            SweRexContainer([url, "http://127.0.0.1:9"], "/proc/app", 600).start()
        assert answers(url)
        held = lease(checked_url(url))
        assert lease(url) is None and SweRexContainer([f"{url}/"], "/app", 600).take(f"{url}/") is False
        held.release()
        container = SweRexContainer([f"{url}/"], "/app", 600)
        container.start()
        container.remove()


@need_swerex
def test_an_episode_of_another_machine_keeps_its_server(own_cache, monkeypatch, tmp_path):
    """Another cache folder stands for another machine, which does not see the lease."""
    monkeypatch.setattr(swerex_container, "WAIT_SECONDS", 0.1)
    with server(monkeypatch) as url:
        until(lambda: answers(url))
        container = SweRexContainer([url], "/app", 600)
        container.start()
        monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "other"))
        with pytest.raises(ContainerError, match=f"{url} serves an episode of another machine, or of another MTRL_C"):
            SweRexContainer([url], "/app", 600).start()
        assert container.run("echo here", 20).output == "here\n"
        container.remove()


KILLED = """
import sys, time
from mtrl.sandbox.swerex_container import SweRexContainer
container = SweRexContainer([sys.argv[1]], "/app", float(sys.argv[2]))
container.start()
command = "touch /app/left; rm -r /tmp/.mtrl-episode; (sleep 1000 &) ; echo started"
print(container.run(command, 20).output, end="", flush=True)
time.sleep(600)
"""


def kill_a_trainer(url, seconds):
    """Kill a process that has started a container and a process in its background."""
    process = forked.Popen([sys.executable, "-c", KILLED, url, str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


@need_swerex
def test_nothing_is_left_after_sigkill_of_the_trainer(own_cache, monkeypatch):
    """The next episode ends the container of a killed process, even if the agent has removed the mark of its episode,
    and without a next episode it ends by itself."""
    with server(monkeypatch) as url:
        kill_a_trainer(url, 600)
        container = SweRexContainer([url], "/app", 600)
        container.start()
        assert container.run(f"ls /app; {COUNT.format(1000)}", 20).output == "0\n"
        container.remove()
        kill_a_trainer(url, 3)
        until(lambda: not answers(url))


@need_swerex
def test_a_wrong_token_and_a_dead_server_are_one_sentence(own_cache, monkeypatch, caplog):
    monkeypatch.setattr(swerex_container, "WAIT_SECONDS", 0.1)
    with server(monkeypatch) as url:
        until(lambda: answers(url))
        monkeypatch.setenv("MTRL_SWEREX_TOKEN", "wrong-token")
        with pytest.raises(UserError, match=f"{url} refuses the token of MTRL_SWEREX_TOKEN; set it to") as refused:
            SweRexContainer([url], "/app", 600).start()
        monkeypatch.setenv("MTRL_SWEREX_TOKEN", TOKEN)
        container = SweRexContainer([url], "/app", 600)
        container.start()
    with pytest.raises(ContainerError, match=f"the server {url} cannot be reached") as dead:
        container.run("true", 5)
    container.remove()
    with pytest.raises(ContainerError, match="none of the 1 servers .* was free and fresh within 0.1 s: the server"):
        SweRexContainer([url], "/app", 600).start()
    assert not any(word in f"{refused.value} {dead.value} {caplog.text}" for word in (TOKEN, "wrong-token"))


def test_addresses_and_token_are_checked(monkeypatch):
    monkeypatch.delenv("MTRL_SWEREX_TOKEN", raising=False)
    with pytest.raises(UserError, match="needs the token of its servers; set the environment variable MTRL_SWEREX_TOK"):
        SweRexClient("http://127.0.0.1:1")
    for url, checked in (
        ("https://Far.example:8000/", "https://far.example:8000"),
        ("https://far.example", "https://far.example:443"),
        ("http://localhost", "http://localhost:80"),
        ("http://[::1]:8001", "http://[::1]:8001"),
    ):
        assert checked_url(url) == checked == checked_url(checked)
    wrong = ("ftp://x", "127.0.0.1:8000", "https://x/path", "https://x?y=1", "https://x?", "https://x#", "https://x:0")
    for url in (*wrong, "https://x:99999", "https://x ", " https://x", "https://x:8000 ", "http://:80", 8000):
        with pytest.raises(UserError, match="is no address; write https://HOST:PORT"):
            checked_url(url)
    with pytest.raises(UserError, match=r"servers=https://\*\*\*@x is no address"):
        checked_url("https://me:secret@x")
    with pytest.raises(UserError, match="servers=http://10.0.0.1:8000 would get the token unencrypted; use https"):
        checked_url("http://10.0.0.1:8000")


class Hostile(http.server.BaseHTTPRequestHandler):
    """A server that an agent has put in the place of the real one: it sends what the test wants."""

    answer, status = b"", 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_):
        pass


def _error(path):
    return json.dumps(
        {"swerexception": {"message": "touch called", "class_path": path, "traceback": "", "extra_info": {}}}
    )


HOSTILE = {
    "no JSON": (200, b"x", "an answer of another form"),
    "deep JSON": (200, b"[" * 200_000, "an answer of another form"),
    "no object": (200, b"[]", "an answer of another form"),
    "another form": (200, b'{"exit_code": true, "stdout": ""}', "an answer of another form"),
    "no text": (200, b'{"exit_code": 0, "stdout": 3}', "an answer of another form"),
    "too much": (200, b"x" * (LARGEST_ANSWER + 1), "more than 16777216 bytes"),
    "a function to call": (511, _error("os.system").encode(), "answered HTTP 511: touch called"),
    "a refused token": (401, b"", "refuses the token of MTRL_SWEREX_TOKEN"),
    "our token": (500, TOKEN.encode(), r"answered HTTP 500: \*\*\*"),
}


@pytest.mark.parametrize(("status", "answer", "sentence"), HOSTILE.values(), ids=HOSTILE.keys())
def test_an_answer_of_another_form_fails_the_episode(status, answer, sentence, own_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("MTRL_SWEREX_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    handler = type("Handler", (Hostile,), {"answer": answer, "status": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as replaced:
        threading.Thread(target=replaced.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        client = SweRexClient(f"http://127.0.0.1:{replaced.server_port}")
        with pytest.raises(ContainerError, match=sentence):
            client.execute(["true"], 20)
        replaced.shutdown()
    assert not os.path.exists("called")


class Obedient(Hostile):
    """A server that an agent has put in the place of the real one: it answers each request as the real one would, runs
    nothing, and does not end."""

    def do_POST(self):
        received = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, received))
        is_claim = b"mkdir" in received
        self._send(json.dumps({"exit_code": 0, "stdout": "/usr/bin/python3\n" if is_claim else ""}).encode())

    def do_GET(self):
        self._send(b'{"is_alive": true}')

    def _send(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)


class WithoutBash(Obedient):
    """A server whose container has lost its bash after the claim."""

    def do_POST(self):
        if len(self.server.received) > 0:
            received = self.rfile.read(int(self.headers["Content-Length"]))
            if b'"bash"' in received:
                self.send_error(511)
            elif b"os.kill(os.getppid(), 15)" in received and json.loads(received)["command"][0] == "/usr/bin/python3":
                self.server.socket.close()
        else:
            super().do_POST()


@contextmanager
def replaced_server(handler, monkeypatch):
    """A server in a thread, and its address."""
    monkeypatch.setenv("MTRL_SWEREX_TOKEN", TOKEN)
    monkeypatch.setattr(swerex_container, "END_SECONDS", 0.2)
    monkeypatch.setattr(swerex_container, "WAIT_SECONDS", 0.1)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as replaced:
        replaced.received = []
        threading.Thread(target=replaced.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield replaced, f"http://127.0.0.1:{replaced.server_port}"
        replaced.shutdown()


def test_a_server_that_the_agent_replaced_gets_no_second_episode(own_cache, monkeypatch, caplog, tmp_path):
    """Its answers are those of a fresh server, and it did not end after its episode."""
    with replaced_server(Obedient, monkeypatch) as (replaced, url):
        first = SweRexContainer([url], "/app", 600)
        first.start()
        first.remove()
        assert f"{url} was used by an episode and does not end; end its container" in caplog.text
        replaced.received.clear()
        for _ in range(2):
            with pytest.raises(ContainerError, match="was used by an episode and does not end; end its container"):
                SweRexContainer([url], "/app", 600).start()
        assert replaced.received and not any(b"mkdir" in body for _, body in replaced.received), "it gets no claim"


def test_a_server_without_bash_ends(own_cache, monkeypatch, caplog):
    with replaced_server(WithoutBash, monkeypatch) as (replaced, url):
        container = SweRexContainer([url], "/app", 600)
        container.start()
        container.remove()
        assert caplog.text == "" and replaced.socket.fileno() == -1
        held = lease(url)
        assert not held.is_used
        held.release()


def _drip_a_header(connection):
    """Send a header a byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    for _ in range(400):
        connection.sendall(b"x")
        time.sleep(0.05)


def _announce_answers(connection):
    """Send one answer after another that announces the real one."""
    for _ in range(400):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def _send_a_part(connection):
    """Send a body that ends at the end of the connection, and do not end it."""
    connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"exit_code": 0, "stdout": ""}')
    while connection.recv(2**16):
        continue


@pytest.mark.parametrize("answer", [_drip_a_header, _announce_answers, _send_a_part])
def test_no_answer_outlasts_its_time_limit(answer, monkeypatch):
    """The server goes on for 20 s, and the client gives up before."""
    monkeypatch.setenv("MTRL_SWEREX_TOKEN", TOKEN)
    given_up = threading.Event()

    def serve():
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.settimeout(20)
            answer(connection)
        given_up.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        client = SweRexClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(ContainerError, match="gave no answer within 0.3 s"):
            client.execute(["true"], 0.3)
        assert given_up.wait(20), "the connection is closed"


def test_an_unreadable_result_is_a_stopped_command():
    """The command and what runs it have the same user, so the command can make the result unreadable."""
    good = '{"output": "x", "exit_code": 2, "stopped": ""}'
    assert parse_result(0, good) == CommandResult("x", 2, "")
    for printed in ("", "{}", "[]", "3", "[" * 100_000):
        assert parse_result(1, printed) == CommandResult("", -1, "the process that ran it ended with exit code 1")
    large = json.dumps({"output": "x" * 2**21, "exit_code": 0, "stopped": "y" * 2**21})
    assert parse_result(0, large) == CommandResult("x" * 2**20, 0, "y" * 200)
    for printed in (
        '{"output": "", "exit_code": true, "stopped": ""}',
        '{"output": 1, "exit_code": 2, "stopped": ""}',
        '{"output": "", "exit_code": "", "stopped": ""}',
    ):
        assert parse_result(0, printed).stopped == "the process that ran it printed another result"
