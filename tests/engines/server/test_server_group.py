"""Servers that are processes: killed, stopped and started again while turns are sampled."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import toy_http_server
from toy_servers import CONTEXT, VOCABULARY, ToySync, check_turn, logprob_of, weights_of

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import Generation, SamplingParams
from mtrl.engines.server import replica
from mtrl.engines.server.api import ServerError, ServerUnreachableError
from mtrl.engines.server.backend import Backend, Command
from mtrl.engines.server.engine import ServerEngine
from mtrl.engines.server.http import Http
from mtrl.errors import UserError
from mtrl.types import FinishReason

pytestmark = pytest.mark.xdist_group("engine_process")

TURN = SamplingParams(max_generate_length=20)
TICK = 0.02


class HttpApi:
    """A `ServerApi` for `toy_http_server.py`."""

    pause_modes: ClassVar = {"continue": "continue", "drain": "drain"}

    def __init__(self, url, token):
        self.url, self.token, self.http = url, token, Http(url, token)

    async def post(self, path, seconds=10.0, **body):
        return await self.http.request("POST", path, body, seconds=seconds)

    async def is_alive(self):
        try:
            await self.post("/version", 1.0)
        except ServerUnreachableError:
            return False
        return True

    async def is_ready(self):
        return await self.post("/version", 1.0) == 0

    async def generate(self, request):
        answer = await self.post("/generate", 60, prompt=request.prompt, tokens=request.max_tokens, tick=TICK)
        ids, spans = answer["token_ids"], [(version, count) for version, count in answer["spans"]]
        logprobs = [logprob_of(token, version) for token, (version, _) in zip(ids, spans, strict=True)]
        return Generation(ids, logprobs, FinishReason.LENGTH, spans)

    async def pause(self, mode):
        await self.post("/pause")

    async def resume(self):
        await self.post("/resume")

    async def begin_update(self):
        """Nothing to do."""

    async def receive_folder(self, folder, version):
        """Nothing to do."""

    async def end_update(self, version):
        await self.post("/load", version=version)

    async def drop_cache(self):
        """Nothing is cached."""

    async def version(self):
        return await self.post("/version")

    async def close(self):
        await self.http.close()


def make(folder, argv=None, **settings):
    def command(place):
        return Command(
            argv or [sys.executable, "-S", toy_http_server.__file__, str(place.port)], {"TOY_TOKEN": place.token}
        )

    backend = Backend("toy", ServerConfig(start_timeout=60.0, **settings), HttpApi, command)
    return ServerEngine(
        backend,
        ToySync(),
        vocabulary=VOCABULARY,
        context=CONTEXT,
        max_num_seqs=8,
        in_flight="continue",
        log_folder=folder,
    )


def has_ended(pid):
    return not Path(f"/proc/{pid}").exists()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def test_killed_and_stopped_servers_are_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_CHECK_SECONDS", 0.5)
    engine = make(tmp_path, replicas=2)
    replicas, pids = engine.server_group.replicas, []

    async def go():
        for number in (signal.SIGKILL, signal.SIGSTOP):
            pids.extend(replica.process.pid for replica in replicas)
            turns = [asyncio.ensure_future(engine.generate(f"{number}{i}/0", [i], TURN)) for i in range(16)]
            await asyncio.sleep(5 * TICK)
            await engine.load_weights(weights_of(number), number)
            os.kill(pids[-1], number)
            for i, turn in enumerate(turns):
                check_turn(await turn, [i], TURN)
            await until(lambda: len(engine.server_group.serving) == 2 and has_ended(pids[-1]))
        assert engine.stats.extra["restarts"] == 2 and engine.stats.sampled_tokens == 2 * 16 * 20
        answers = await engine.probe([1], TURN)
        assert [answer.version_spans for answer in answers] == [[(signal.SIGSTOP, 20)]] * 2
        pids.extend(replica.process.pid for replica in replicas)
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))
    assert all(map(has_ended, pids))


def test_the_token_is_required_and_not_on_the_command_line(tmp_path):
    engine = make(tmp_path)
    (server,) = engine.server_group.replicas

    async def go():
        command = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        token = server.api.token
        assert token and token not in command
        with pytest.raises(ServerError, match="401"):
            await HttpApi(server.api.url, "other").post("/version")
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_log_error_of_a_server_that_cannot_start_is_reported(tmp_path):
    words = "import sys; print('out of luck', file=sys.stderr); sys.exit('ValueError: no such model')"
    with pytest.raises(
        UserError, match='toy server . cannot be used: it ended .*"ValueError: no such model".*toy_..log'
    ):
        make(tmp_path, argv=[sys.executable, "-c", words], replicas=2)


def test_a_port_of_another_process_is_replaced(tmp_path, monkeypatch):
    """The server is started on another port, although the first one answers requests."""
    monkeypatch.setenv("TOY_TOKEN", "another")
    with toy_http_server.Server(("127.0.0.1", 0), toy_http_server.Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        ports, free = [other.server_address[1]], replica.free_port
        monkeypatch.setattr(replica, "free_port", lambda: ports.pop() if ports else free())
        engine = make(tmp_path)
        other.shutdown()
    assert not ports
    asyncio.run(engine.close())
