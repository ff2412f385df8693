"""A real vLLM server that cannot start reports the reason."""

import asyncio
import os
import subprocess

import pytest

from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.server.process import ServerProcess, free_port
from tests.engines.real.conftest import make_backend
from tests.engines.real.installed import engine_python

pytestmark = [pytest.mark.slow, pytest.mark.rare]


def test_a_wrong_model_and_an_unknown_argument_are_reported(tied_model, tmp_path):
    engine_python("vllm")
    starts = {
        "model": make_backend("vllm", tmp_path / "no-such-model"),
        "argument": make_backend("vllm", tied_model, args={"no_such_argument": 1}),
    }
    processes = [
        ServerProcess(backend.make_command(ServerPlace(free_port(), "t" * 32)), tmp_path / f"{name}.log", name)
        for name, backend in starts.items()
    ]

    async def ended():
        async with asyncio.timeout(240):
            return await asyncio.gather(*(process.wait() for process in processes))

    try:
        assert all(code not in (0, None) for code in asyncio.run(ended()))
        wrong_model, unknown_argument = (process.error_line() for process in processes)
    finally:
        for process in processes:
            process.end(0.5)
    assert "no-such-model" in wrong_model
    assert "unrecognized arguments: --no-such-argument" in unknown_argument


def test_no_server_starts_without_a_token():
    module = "mtrl.engines.vllm.serve"
    environment = {name: value for name, value in os.environ.items() if name != "MTRL_SERVER_TOKEN"}
    found = subprocess.run(
        [engine_python("vllm"), "-m", module], capture_output=True, text=True, timeout=60, env=environment
    )
    assert found.returncode == 1 and "MTRL_SERVER_TOKEN has no token" in found.stderr
