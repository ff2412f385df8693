"""Clients that disconnect, stall, send garbage or use foreign tokens do not affect others."""

import asyncio
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_gateway import HELLO, HeldEngine, Live, read_until, received, request_bytes

from mtrl.gateway import exchange
from mtrl.utils import http_protocol

BODY = {"model": "m", "messages": HELLO}
MANY = 120


@pytest.fixture(scope="module")
def live(tiny_codec):
    with Live(tiny_codec, max_body=100_000) as live:
        yield live


@pytest.fixture
def bystander(live, request):
    """A trajectory that must still work after the test."""
    session = live.open(f"{request.node.name} bystander")
    assert live.chat(session)[0] == 200
    yield session
    status, body = live.chat(session)
    assert (status, body["choices"][0]["message"]["content"]) == (200, f"{session.name} 1")
    live.close(session)


@pytest.mark.usefixtures("bystander")
class TestBodies:
    def test_a_declared_oversize_body_is_not_read(self, live, session):
        head = f"POST /trajectories/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        with live.connect() as connection:
            connection.sendall(f"{head}content-length: 99999999999999999999\r\n\r\n".encode())
            assert read_until(connection, b"request_too_large").startswith(b"HTTP/1.1 413")

    def test_an_oversize_body_is_refused(self, live, session):
        head = f"POST /trajectories/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        chunk = b"10000\r\n" + b"[" * 0x10000 + b"\r\n"
        with live.connect() as connection:
            connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + 2 * chunk)
            assert read_until(connection, b"request_too_large").startswith(b"HTTP/1.1 413")
            connection.sendall(2 * chunk + b"0\r\n\r\n" + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_until(connection, b"healthy").startswith(b"HTTP/1.1 200")

    def test_an_unfinished_body_times_out(self, live, session, monkeypatch):
        monkeypatch.setattr(http_protocol, "SECONDS_FOR_HEADERS", 0.2)
        head = f"POST /trajectories/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        chunk = b"10000\r\n" + b"[" * 0x10000 + b"\r\n"
        with live.connect() as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            while True:
                connection.sendall(chunk)

    def test_the_body_of_an_unknown_client_is_not_read(self, live):
        with live.connect() as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n")
            assert b"HTTP/1.1 401" in connection.recv(65536)

    def test_a_slow_body_times_out(self, live, session, monkeypatch):
        monkeypatch.setattr(exchange, "SECONDS_TO_SEND", 0.2)
        with live.connect() as connection:
            connection.sendall(request_bytes(session, BODY)[:-5])
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 408")

    def test_a_truncated_body_is_ignored(self, live, session):
        for end in (socket.SHUT_WR, socket.SHUT_RDWR):
            with live.connect() as connection:
                connection.sendall(request_bytes(session, BODY)[:-5])
                connection.shutdown(end)
        assert live.turns(session) == []

    def test_unfinished_headers_time_out(self, live, monkeypatch):
        monkeypatch.setattr(http_protocol, "SECONDS_FOR_HEADERS", 0.2)
        for beginning in (b"", b"POST /v1/chat/compl", b"GET /health HTTP/1.1\r\nx: y\r\n"):
            with live.connect() as connection:
                connection.sendall(beginning)
                assert ended(connection)
        with live.connect() as connection:  # the second request of a connection as well
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            read_until(connection, b"healthy")
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            assert ended(connection)

    def test_oversize_headers_are_refused(self, live):
        with live.connect() as connection:
            with suppress(ConnectionResetError, BrokenPipeError):  # it ends before it has read all
                connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 30_000)
            assert ended(connection)

    @pytest.mark.parametrize("route", ["/health", "/v1/models", "/nowhere"])
    def test_garbage_after_an_answer_closes_the_connection(self, live, caplog, route):
        """The answer comes before the body has been read, so the connection cannot be used again."""
        with live.connect() as connection:
            connection.sendall(f"GET {route} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            read_until(connection, b"}")
            connection.sendall(b"no length\r\n")
            assert ended(connection)
        assert caplog.text == ""

    def test_one_byte_chunks_do_not_block_other_clients(self, live, session, monkeypatch):
        """The parser needs a long time for such chunks, and other clients wait for it."""
        sizes, real = [], http_protocol.PatientProtocol.data_received

        def data_received(self, data):
            sizes.append(len(data))
            real(self, data)

        monkeypatch.setattr(http_protocol.PatientProtocol, "data_received", data_received)
        head = f"POST /trajectories/{session.token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        chunks = b"1\r\n[\r\n" * 20_000
        with live.connect() as connection:
            connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n")
            assert read_until(connection, b"not JSON").startswith(b"HTTP/1.1 400")
        assert sum(sizes) > len(chunks)
        assert max(sizes) <= http_protocol.READ_BYTES

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        body=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["messages", "role", "content", "tools", "n", "stop", "tool_calls", "function"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_invalid_requests_are_refused(self, live, session, body):
        path = f"/trajectories/{session.token}"
        for route in ("/v1/chat/completions", "/v1/completions", "/update-reward", "/complete-rollout"):
            status, _, answer = live.ask("POST", path + route, json.dumps(body).encode())
            assert status in (200, 400, 403), (route, body, answer)
        live.close(session)
        session.__dict__.update(live.open(session.name).__dict__)

    @settings(max_examples=40, deadline=None)
    @given(data=st.binary(min_size=1, max_size=200))
    def test_invalid_http_is_refused(self, live, data):
        with live.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            received(connection)


def ended(connection):
    """Whether the other side closes the connection, perhaps after a message, within the time limit of the socket."""
    with suppress(ConnectionResetError):
        received(connection)
    return True


class TestTokens:
    def test_a_token_gives_no_access_to_another_trajectory(self, live, session, bystander):
        path = f"/trajectories/{bystander.token}"
        for route, body in (
            ("/v1/chat/completions", BODY), ("/v1/completions", {"prompt": "x"}), ("/update-reward", {"Rewards": [9]}),
            ("/complete-rollout", {"Status": "failed"}),
        ):  # fmt: skip
            assert live.ask("POST", path + route, body, session.token)[0] == 403
        assert live.ask("GET", f"{path}/v1/models", None, session.token)[0] == 403
        assert (len(live.turns(bystander)), bystander.rewards, bystander.status) == (1, None, None)

    def test_the_token_of_a_finished_trajectory_is_refused(self, live, session, bystander):
        old = live.open("old")
        live.close(old)
        young = live.open("old")
        for route in ("/v1/chat/completions", f"/trajectories/{young.token}/v1/chat/completions"):
            assert live.ask("POST", route, BODY, old.token)[0] == 410
        assert live.turns(young) == []
        live.close(young)

    def test_no_answer_contains_a_token(self, live, session):
        found = [
            live.chat(session), live.chat(session, []), live.chat(session, n=999),
            live.ask("GET", "/v1/models", None, session.token),
            live.ask("POST", "/nowhere", None, session.token),
            live.ask("POST", f"/trajectories/{session.token}/update-reward", {"Rewards": "x"}),
            live.ask("POST", f"/trajectories/{session.token}/complete-rollout", {"Status": "ready"}),
        ]  # fmt: skip
        assert session.token not in json.dumps(found)


class TestConcurrentClients:
    def test_concurrent_clients_get_their_own_answers(self, tiny_codec):
        """The calls are shuffled, every third one is a stream, and other connections send nothing or no HTTP."""
        rng = random.Random(0)

        async def converse(live, session):
            messages = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{session.name} asks {turn}"})
                await asyncio.sleep(rng.random() / 20)
                reply = await answer(live, session, {"messages": messages, "stream": rng.random() < 0.33})
                assert reply == f"{session.name} says {turn}"
                messages.append({"role": "assistant", "content": reply})

        async def disturb(live, number):
            _, writer = await asyncio.open_connection(*live.address)
            writer.write(rng.randbytes(50) + b"\r\n\r\n" if number % 2 else b"")
            await asyncio.sleep(rng.random() / 10)
            writer.close()

        async def all_of_them(live, sessions):
            others = (disturb(live, number) for number in range(MANY // 4))
            await asyncio.gather(*(converse(live, session) for session in sessions), *others)

        with Live(tiny_codec, lambda name, turn: f"{name} says {turn}") as live:
            sessions = [live.open(f"t{n}") for n in range(MANY)]
            asyncio.run(asyncio.wait_for(all_of_them(live, sessions), 120))
            for session in sessions:
                turns = live.turns(session)
                assert [turn.text for turn in turns] == [f"{session.name} says {turn}" for turn in range(3)]
                assert all(turn.break_reason is None for turn in turns)
                heard = [message["content"] for turn in turns for message in turn.observation]
                assert heard == [f"{session.name} asks {turn}" for turn in range(3)]

    def test_disconnected_clients_do_not_affect_others(self, tiny_codec):
        engine = HeldEngine(lambda name, turn: f"{name} {turn}", tiny_codec.tokenizer)
        with Live(tiny_codec, engine=engine) as live, ThreadPoolExecutor(8) as pool:
            staying = [live.open(f"stays{n}") for n in range(8)]
            leaving = [live.open(f"leaves{n}") for n in range(8)]
            answers = [pool.submit(live.chat, session) for session in staying]
            connections = []
            for session in leaving:
                connection = socket.create_connection(live.address, timeout=20)
                connection.sendall(request_bytes(session, {**BODY, "stream": len(connections) % 2 == 0}))
                connections.append(connection)
            until(lambda: len(engine.requested) == 16)
            for connection in connections:
                connection.close()
            until(lambda: len(engine.aborted) == 8)
            live.call(engine.gate.set)
            assert [answer.result(20)[0] for answer in answers] == [200] * 8
            assert sorted(engine.aborted) == sorted(session.name for session in leaving)
            assert [len(live.turns(session)) for session in (*staying, *leaving)] == [1] * 8 + [0] * 8

    def test_a_client_that_never_reads_blocks_no_other(self, tiny_codec, monkeypatch):
        """The client stops reading its stream; its trajectory can still be closed."""
        with Live(tiny_codec) as live:
            sleeper, bystander = live.open("sleeper"), live.open("bystander")
            with live.connect() as connection:
                for _ in range(20):
                    connection.sendall(request_bytes(sleeper, {**BODY, "stream": True, "logprobs": True}))
                assert live.chat(bystander)[0] == 200
                live.close(sleeper)
                assert live.chat(bystander)[0] == 200


async def answer(live, session, body):
    """Return the answer of the model, by a connection of its own, which is ten times as fast as a real client."""
    reader, writer = await asyncio.open_connection(*live.address)
    writer.write(request_bytes(session, body, connection="close"))
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200"), rest
    if not body["stream"]:
        return json.loads(rest)["choices"][0]["message"]["content"]
    chunks = [line for line in rest.decode().splitlines() if line.startswith('data: {"')]
    deltas = [json.loads(chunk[6:])["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content") or "" for delta in deltas)


def until(holds, seconds=20):
    """Wait until another thread has made the condition true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
