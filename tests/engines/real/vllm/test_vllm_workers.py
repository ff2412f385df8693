"""A real vLLM server with two workers: after a call that fails in one worker or in both, every later call gets its own
answers, and the next update brings the right weights. No server is started again."""

from itertools import count

import pytest
from engine_model import PARITY, changed, load_model, lost_change, named_weights, reference_logprobs, worst
from vllm_weights import by_folder, payload_of, update

from mtrl.config.engine_schema import VllmConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerError, TurnRequest
from mtrl.engines.server.transports import make_sync

pytestmark = [pytest.mark.slow, pytest.mark.rare]

PROMPT = list(range(20, 84))
SETTINGS = {"tensor_parallel_size": 2, "sync_timeout": 60.0, "request_timeout": 90.0}
NO_TENSOR = "Y29zCnN5c3RlbQou"
"""Payload that no worker accepts: a pickle that names os.system."""
versions, requests = count(1), count()


@pytest.fixture(scope="module")
def server(serving, untied_model):
    return serving("vllm", untied_model, max_lora_rank=4, **SETTINGS)


async def check(api, model, version):
    """Check that the server samples as this model does, and reports its version."""
    turn = await api.generate(TurnRequest(f"turn-{next(requests)}", PROMPT, SamplingParams(seed=version), 24))
    assert await api.version() == version
    assert turn.version_spans == [(version, 24)]
    assert worst(turn.logprobs, reference_logprobs(model, PROMPT, turn.token_ids)) < PARITY


async def check_next_update(api, model):
    """Change the model, and check that the server receives it."""
    version = next(versions)
    await update(api, by_folder, named_weights(changed(model, version)), version)
    await check(api, model, version)


def test_weights_that_both_workers_refuse(server, untied_model):
    async def scenario(api):
        model = load_model(untied_model)
        await check_next_update(api, model)
        with pytest.raises(ServerError, match="worker 0 of 2 failed: .* checksum [0-9a-f]{64}, the trainer's is f00"):
            await update(api, by_folder, named_weights(model), next(versions), checksum="f00")
        await check_next_update(api, model)

    server.ask(scenario)


@pytest.mark.parametrize("failing", [0, 1])
def test_weights_that_one_worker_refuses(server, untied_model, failing):
    async def scenario(api):
        model = load_model(untied_model)
        payloads = [payload_of(named_weights(model)), NO_TENSOR]

        async def send(api, weights, version, checksum):
            await api.receive_tensors(payloads if failing else payloads[::-1], version)

        with pytest.raises(ServerError, match=f"worker {failing} of 2 failed: .* does not rebuild a tensor"):
            await update(api, send, None, next(versions))
        await check_next_update(api, model)

    server.ask(scenario)


def test_an_update_that_a_dead_trainer_left_open(server, untied_model):
    async def scenario(api):
        await api.begin_update()
        await check_next_update(api, load_model(untied_model))

    server.ask(scenario)


def test_an_adapter_that_does_not_exist(server, untied_model, tmp_path):
    async def scenario(api):
        with pytest.raises(ServerError, match="No adapter found"):
            await api.load_adapter("absent", str(tmp_path))
        await check_next_update(api, load_model(untied_model))

    server.ask(scenario)


def test_changes_that_both_workers_refuse_are_replaced_by_whole_weights(server, untied_model, monkeypatch, caplog):
    settings = VllmConfig(weight_sync="distributed", sync_delta=True, **SETTINGS)

    async def send(api, sync, model):
        version = next(versions)
        await api.pause("drain")
        await sync.send([api], named_weights(changed(model, version)), version)
        await api.drop_cache()
        await api.resume()
        await check(api, model, version)

    async def scenario(api):
        model = load_model(untied_model)
        sync = make_sync(settings, model=str(untied_model), dtype="float32", lora_scaling=None)
        for _ in range(2):
            await send(api, sync, model)
        assert not caplog.text
        await check_next_update(api, model)  # files replace the weights that the workers kept
        await send(api, sync, model)
        assert "worker 0 of 2 failed: this worker keeps no weights" in caplog.text
        with monkeypatch.context() as patch:
            patch.setattr("mtrl.engines.server.weight_parts.find_changes", lost_change)
            await send(api, sync, model)
        assert "did not load the changes" in caplog.text and "checksum" in caplog.text
        await sync.close()

    server.ask(scenario)
