"""An engine whose servers are processes of toy_http_server.py, and the API of such a server."""

import sys
from pathlib import Path
from typing import ClassVar

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.backend import ServerBackend, ServerCommand
from mtrl.engines.server.engine import ServerEngine
from mtrl.engines.server.http import Http
from mtrl.engines.server.server_api import ServerUnreachableError
from mtrl.types import FinishReason, Generation
from tests.engines.server.toy_servers import CONTEXT, VOCABULARY, ToySync, logprob_of

SERVER = str(Path(__file__).with_name("toy_http_server.py"))
TICK = 0.02
"""Seconds per token."""


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
        """Do nothing: the server has no cache."""

    async def version(self):
        return await self.post("/version")

    async def close(self):
        await self.http.close()


def make_http_engine(folder, argv=None, **settings):
    def command(place):
        return ServerCommand(argv or [sys.executable, "-S", SERVER, str(place.port)], {"TOY_TOKEN": place.token})

    backend = ServerBackend("toy", ServerConfig(start_timeout=60.0, **settings), HttpApi, command)
    return ServerEngine(
        backend,
        ToySync(),
        vocabulary=VOCABULARY,
        context=CONTEXT,
        max_num_seqs=8,
        in_flight="continue",
        log_folder=folder,
    )
