"""A gateway on a separate thread, so that clients can send requests as a program would."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.types import FinishReason, Generation

SECONDS = 20
LIMITS = SessionLimits(max_calls=1000, max_calls_at_once=8, max_context_length=4000)
HELLO = [{"role": "user", "content": "hello"}]


class HeldEngine(ScriptedEngine):
    """An engine that answers only when the test allows it; it records requests and aborted turns."""

    def __init__(self, respond, tokenizer):
        super().__init__(respond, tokenizer)
        self.requested, self.aborted = [], []
        self.someone_asks = threading.Event()
        self.someone_left = threading.Event()
        self.gate = asyncio.Event()
        self.released = {}

    def open(self, trajectory_id):
        super().open(trajectory_id)
        self.released[trajectory_id] = asyncio.Event()

    def release(self, trajectory_id):
        super().release(trajectory_id)
        self.released[trajectory_id].set()

    async def generate(self, trajectory_id, prompt, sampling):
        self.requested.append(trajectory_id)
        self.someone_asks.set()
        try:
            if not await self._let(self.released[trajectory_id]):
                return Generation([], [], FinishReason.ABORT, [])
            return await super().generate(trajectory_id, prompt, sampling)
        except asyncio.CancelledError:
            self.aborted.append(trajectory_id)
            self.someone_left.set()
            raise

    async def _let(self, released):
        """Wait until the engine may answer. Return False if the trajectory is released before."""
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.gate, released)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return not released.is_set()


class Live:
    """`with Live(codec, respond) as live:` runs a gateway whose answers are `respond(trajectory id, turn)`."""

    def __init__(self, codec, respond=lambda name, turn: f"{name} {turn}", limits=LIMITS, engine=None, **options):
        self.codec = codec
        self.engine = engine or ScriptedEngine(respond, codec.tokenizer)
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway(self.engine, codec, limits, **options)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        self.run(self.gateway.start())
        return self

    def __exit__(self, *_):
        self.run(self.gateway.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(SECONDS)
        self.loop.close()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def call(self, function, *args):
        """Call a function on the thread of the gateway."""

        async def call():
            return function(*args)

        return self.run(call())

    def open(self, name="a", **sampling):
        params = SamplingParams(max_generate_length=200, stop_token_ids=self.codec.stop_token_ids)
        return self.call(self.gateway.open, name, replace(params, **sampling))

    def close(self, session):
        self.call(self.gateway.close_session, session)

    def turns(self, session):
        return self.call(session.turns)

    @property
    def address(self):
        host, _, port = self.gateway.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def ask(self, method, path, body=None, token=None, headers=()):
        """Send one request, and return the status, the headers and the parsed body of the answer."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if token is not None:
            lines.append(f"authorization: Bearer {token}")
        answer = self.send("\r\n".join([*lines, "", ""]).encode() + content)
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *others = head.decode().split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
        parsed = json.loads(rest) if found.get("content-type") == "application/json" else rest
        return int(first.split()[1]), found, parsed

    def chat(self, session, messages=HELLO, **options):
        """Request a chat completion by the session's URL, and return the status and the body."""
        path = f"/trajectories/{session.token}/v1/chat/completions"
        status, _, body = self.ask("POST", path, {"model": "m", "messages": messages, **options})
        return status, body

    def send(self, data):
        """Send raw bytes, and return all bytes that are received until the other side closes."""
        with self.connect() as connection:
            connection.sendall(data)
            return received(connection)

    @contextmanager
    def connect(self):
        with socket.create_connection(self.address, timeout=SECONDS) as connection:
            yield connection


def received(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_until(connection, end):
    """Return the received bytes up to and including `end`."""
    found = b""
    while end not in found:
        part = connection.recv(65536)
        assert part, found
        found += part
    return found


def request_bytes(session, body, **headers):
    """Return the request of a chat completion by the session's URL, on a connection that stays open."""
    content = json.dumps(body).encode()
    lines = [f"POST /trajectories/{session.token}/v1/chat/completions HTTP/1.1", "host: x"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content
