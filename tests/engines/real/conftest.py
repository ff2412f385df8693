"""Fixtures with servers of the real engines, each started once for the tests of a module (`serving`).

Their interpreters are found as by the trainer: `MTRL_VLLM_PYTHON`, `MTRL_SGLANG_PYTHON`, or the environment that
`scripts/install_engine.py` made. The tests of an engine that is not installed are skipped with the command that
installs it.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from engine_model import CONTEXT, make_model

from mtrl.config.engine_schema import SglangConfig, VllmConfig
from mtrl.engines.server.backend import ServerBackend, ServerPlace
from mtrl.engines.server.launch import Launch
from mtrl.engines.server.process import ServerProcess, free_port
from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.sglang.command import sglang_command
from mtrl.engines.sglang.sglang_api import SglangApi
from mtrl.engines.vllm.command import vllm_command
from mtrl.engines.vllm.vllm_api import VllmApi
from tests.engines.real.installed import engine_python

WORDS = {
    "vllm": (VllmApi, vllm_command, VllmConfig),
    "sglang": (SglangApi, sglang_command, SglangConfig),
}

STARTING = 240.0
"""Time limit in seconds for the start of a server. On a busy machine the import of the engine takes most of it."""
LOOK = 0.25
"""Seconds between two requests that ask whether the server is ready."""


def pytest_collection_modifyitems(items):
    """Put the tests without a group of their own into one process of a parallel run, so that few servers run."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("engines"))


def make_backend(
    name: str, model: Path, context=CONTEXT, max_num_seqs=16, max_lora_rank=0, **settings
) -> ServerBackend:
    """Return the backend of a real engine, with these keys of `generator.<engine>`."""
    api, command, config = WORDS[name]
    chosen = config(**settings)
    launch = Launch(
        chosen, str(model), context, max_num_seqs, 0.5, "float32", engine_python(name), True, max_lora_rank
    )  # fmt: skip
    return ServerBackend(name, chosen, partial(api, settings=chosen), partial(command, launch))


@dataclass
class Served:
    """A running server of a real engine."""

    backend: ServerBackend
    place: ServerPlace
    process: ServerProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.place.port}"

    @asynccontextmanager
    async def api(self, token: str | None = None):
        """`async with server.api() as api`: an API for one event loop, perhaps with another token."""
        api: ServerApi = self.backend.make_api(self.url, self.place.token if token is None else token)
        try:
            yield api
        finally:
            await api.close()

    def ask(self, act, seconds: float = 120.0):
        """Run one coroutine such as `ask(lambda api: api.version())` in an event loop of its own, with a time limit."""

        async def once():
            async with asyncio.timeout(seconds), self.api() as api:
                return await act(api)

        return asyncio.run(once())


@contextmanager
def served(backend: ServerBackend, log: Path):
    """Start a server, wait until it is ready, and end it with all its processes afterwards."""
    place = ServerPlace(free_port(), secrets.token_hex(16))
    server = Served(backend, place, ServerProcess(backend.make_command(place), log, backend.name))
    try:
        asyncio.run(_until_ready(server))
        yield server
    finally:
        server.process.end(1.0)


async def _until_ready(server: Served) -> None:
    ended = asyncio.create_task(server.process.wait())
    async with asyncio.timeout(STARTING), server.api() as api:
        while not await api.is_ready():
            await asyncio.wait([ended], timeout=LOOK)
            if ended.done():
                pytest.fail(f"{server.backend.name} ended with {ended.result()}: {server.process.error_line()}")
    ended.cancel()


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """Function `serving(name, model, **settings)` that returns a `Served`, which the tests of the module share."""
    with ExitStack() as exits:

        def start(name: str, model: Path, **settings) -> Served:
            engine_python(name)
            log = tmp_path_factory.mktemp(f"{name}-server") / "log"
            return exits.enter_context(served(make_backend(name, model, **settings), log))

        yield start


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory, tiny_tokenizer) -> Path:
    """Folder of a tiny Qwen3 whose head is its embedding."""
    return make_model(tmp_path_factory.mktemp("model") / "tied", tiny_tokenizer)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory, tiny_tokenizer) -> Path:
    """Folder of a tiny Qwen3 with a head of its own."""
    return make_model(tmp_path_factory.mktemp("model") / "untied", tiny_tokenizer, is_tied=False)
