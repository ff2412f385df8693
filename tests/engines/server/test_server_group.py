"""Servers that are processes: killed, stopped and started again while turns are sampled."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from mtrl.engines.base import SamplingParams
from mtrl.engines.server import replica
from mtrl.engines.server.server_api import ServerError
from mtrl.errors import UserError
from tests.engines.server import toy_http_server
from tests.engines.server.toy_http_api import TICK, HttpApi, make_http_engine
from tests.engines.server.toy_servers import check_turn, weights_of

pytestmark = pytest.mark.xdist_group("engine_process")

TURN = SamplingParams(max_generate_length=20)


def has_ended(pid):
    return not Path(f"/proc/{pid}").exists()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


def test_killed_and_stopped_servers_are_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_CHECK_SECONDS", 0.5)
    engine = make_http_engine(tmp_path, replicas=2)
    replicas, pids = engine.server_group.replicas, []

    async def go():
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            pids.extend(replica.process.pid for replica in replicas)
            turns = [asyncio.ensure_future(engine.generate(f"{number}{i}/0", [i], TURN)) for i in range(16)]
            await asyncio.sleep(5 * TICK)
            await engine.load_weights(weights_of(number), number)
            os.kill(pids[-1], number)
            for i, turn in enumerate(turns):
                check_turn(await turn, [i], TURN)
            # a killed server still counts as serving until its supervision notices that it has ended
            await until(lambda n=restarts: engine.stats.extra["restarts"] == n)
            await until(lambda: len(engine.server_group.serving) == 2 and has_ended(pids[-1]))
        assert engine.stats.extra["restarts"] == 2 and engine.stats.sampled_tokens == 2 * 16 * 20
        answers = await engine.probe([1], TURN)
        assert [answer.version_spans for answer in answers] == [[(signal.SIGSTOP, 20)]] * 2
        pids.extend(replica.process.pid for replica in replicas)
        await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))
    assert all(map(has_ended, pids))


def test_the_token_is_required_and_not_on_the_command_line(tmp_path):
    engine = make_http_engine(tmp_path)
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
        make_http_engine(tmp_path, argv=[sys.executable, "-c", words], replicas=2)


def test_a_port_of_another_process_is_replaced(tmp_path, monkeypatch):
    """The server is started on another port, although the first one answers requests."""
    monkeypatch.setenv("TOY_TOKEN", "another")
    with toy_http_server.Server(("127.0.0.1", 0), toy_http_server.Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        ports, free = [other.server_address[1]], replica.free_port
        monkeypatch.setattr(replica, "free_port", lambda: ports.pop() if ports else free())
        engine = make_http_engine(tmp_path)
        other.shutdown()
    assert not ports
    asyncio.run(engine.close())
