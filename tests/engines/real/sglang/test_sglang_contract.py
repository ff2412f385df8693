"""Every body that `SglangApi` can send, built into SGLang's own types of requests, which refuse what they do not know.

And its arguments by SGLang's own parser, its platform as SGLang finds it, and a server that cannot start.
"""

import asyncio
import base64
import inspect
import json
import subprocess
from pathlib import Path

import pytest

from mtrl.config.engine_schema import SglangConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.backend import ServerPlace
from mtrl.engines.server.launch import Launch
from mtrl.engines.server.log_errors import error_line
from mtrl.engines.server.server_api import Rendezvous, TensorLayout, TurnRequest
from mtrl.engines.sglang.command import sglang_command
from mtrl.engines.sglang.platform import PLATFORM
from mtrl.engines.sglang.sglang_api import SglangApi
from tests.engines.real.installed import engine_python

pytestmark = [pytest.mark.slow, pytest.mark.rare]

SCRIPT = Path(__file__).with_name("sglang_types.py")
TURN = {
    "output_ids": [5],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "weight_version": "0",
        "output_token_logprobs": [[-1.0, 5, None]],
    },
}


class Recorder:
    """Stand-in for `Http` that records requests and answers with success."""

    def __init__(self):
        self.sent = []

    async def request(self, method, path, body=None, *, seconds, params=None):
        self.sent.append((path, body))
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0}
        return {"/generate": TURN, "/v1/loads": {"loads": [load]}, "/model_info": {"weight_version": "0"}}.get(path)

    async def close(self):
        pass


async def use_all(api):
    """Call every method of `ServerApi`."""
    whole = SamplingParams(50, 0.7, 0.9, 20, ("</a>", "\n"), (1, 2), 7)
    for sampling in (whole, SamplingParams(), SamplingParams(temperature=0.0)):
        await api.generate(TurnRequest("a", [1, 2, 3], sampling, 50, "salt", "policy-1"))
        await api.generate(TurnRequest("b", [1], sampling, 50))
    turn = asyncio.create_task(api.generate(TurnRequest("c", [1], whole, 50)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await api.abort("c")
    await turn
    for mode in api.pause_modes:
        await api.pause(mode)
        await api.resume()
    layout = TensorLayout("model.norm.weight", "bfloat16", (64,))
    await api.begin_update()
    await api.join(Rendezvous("127.0.0.1", 1234, 3, 1, "gloo", "meeting"))
    await api.receive_broadcast([layout], "meeting", 1)
    await api.leave("meeting")
    await api.receive_tensors([base64.b64encode(b"tensors").decode()], 1)
    await api.receive_folder("/folder", 1)
    await api.end_update(1)
    await api.load_adapter("policy-1", "/folder")
    await api.drop_adapter("policy-1")
    for step in (api.drop_cache, api.version, api.is_alive, api.is_ready, api.sleep, api.wake, api.waiting, api.close):
        await step()


def record():
    """Return all sent `(path, body)`, and the paths."""
    sent = []
    for settings in (
        SglangConfig(),
        SglangConfig(tensor_parallel_size=2, args={"enable-deterministic-inference": True}),
    ):
        recorder = Recorder()
        asyncio.run(use_all(SglangApi("http://127.0.0.1:1", None, settings, recorder)))
        sent += recorder.sent
    return sent, {path for path, _ in sent}


def arguments(settings=None, dtype="float32", is_cpu=True, max_lora_rank=0):
    launch = Launch(settings or SglangConfig(), "/no/model", 2048, 8, 0.6, dtype, "python", is_cpu, max_lora_rank)
    return list(sglang_command(launch, ServerPlace(1234, "token")).argv[3:])


@pytest.fixture(scope="module")
def interpreter():
    return engine_python("sglang")


@pytest.fixture(scope="module")
def requested(interpreter, tmp_path_factory):
    """The results of SGLang's own types, parser and platform, from one process for all tests of this module."""
    sent, _ = record()
    variants = [
        arguments(),
        arguments(SglangConfig(tensor_parallel_size=2, prefix_caching=False), max_lora_rank=8),
        arguments(SglangConfig(colocate=True), is_cpu=False, dtype="bfloat16", max_lora_rank=8),
        arguments(SglangConfig(args={"no-such-argument": 1})),
    ]
    done = subprocess.run(
        [interpreter, str(SCRIPT)],
        input=json.dumps({"bodies": sent, "arguments": variants, "served": arguments()}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path_factory.mktemp("home")),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "MTRL_SERVER_TOKEN": "token",
        },
        cwd=tmp_path_factory.mktemp("cwd"),
    )
    message = [line for line in done.stdout.splitlines() if line.startswith('{"wrong"')]
    assert message, done.stdout[-3000:]
    return json.loads(message[0]) | {"returncode": done.returncode, "log": done.stdout.partition(message[0])[2]}


def test_every_body_is_one_of_sglangs_requests(requested):
    assert requested["wrong"] == []


def test_every_route_of_the_api_is_covered():
    _, used = record()
    source = inspect.getsource(SglangApi)
    paths = {word.split('"')[0] for word in source.split('"/')[1:]} - {""}
    assert {path.lstrip("/") for path in used} == paths


def test_sglang_accepts_our_arguments_and_names_an_unknown_one(requested):
    *good, wrong = requested["arguments"]
    assert good == ["", "", ""]
    assert "unrecognized arguments: --no-such-argument 1" in error_line(wrong)


def test_sglang_uses_our_platform_without_a_gpu(requested):
    assert requested["platform"] == PLATFORM
    assert requested["with_cuda"] is None


def test_a_wrong_model_path_is_reported(requested):
    assert requested["returncode"] != 0
    assert "/no/model" in error_line(requested["log"])
