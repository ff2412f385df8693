"""Every way of new weights into the real engines; each time the trainer gives the tokens sampled next the log-probs
that the engine gave them."""

from itertools import count

import pytest
import torch
from engine_model import PARITY, changed, load_model, lost_change, named_weights, reference_logprobs, worst

from mtrl.config.engine_schema import SglangConfig, VllmConfig
from mtrl.config.model_schema import ModelConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.distributed_sync import DistributedSync
from mtrl.engines.server.export import FullWeights
from mtrl.engines.server.server_api import TurnRequest
from mtrl.engines.server.sync import SyncError
from mtrl.engines.server.tensor_sync import TensorSync
from mtrl.engines.server.transports import make_sync
from mtrl.models.lora import LoraWeights, adapter_state, add_adapters, scaling_of

pytestmark = [pytest.mark.slow, pytest.mark.rare]

CONFIGS = {"vllm": VllmConfig, "sglang": SglangConfig}
WAYS = ("disk", "distributed", "tensor")
PROMPT = list(range(5, 45))
versions, requests = count(1), count()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def server(engine, serving, tied_model):
    return serving(engine, tied_model)


@pytest.fixture
def make(engine, tied_model):
    """Return the weight sync of this name."""
    return lambda way, **more: make_sync(
        CONFIGS[engine](weight_sync=way, sync_timeout=60.0), model=str(tied_model), dtype="float32",
        **{"lora_scaling": None, **more},
    )  # fmt: skip


async def check(api, model, version):
    """Check that the server samples as this model does, and reports its version."""
    sampling = SamplingParams(temperature=0.8, seed=version)
    turn = await api.generate(TurnRequest(f"check-{next(requests)}", PROMPT, sampling, 24))
    assert await api.version() == version
    assert turn.version_spans == [(version, len(turn.token_ids))]
    assert worst(turn.logprobs, reference_logprobs(model, PROMPT, turn.token_ids, 0.8)) < PARITY


async def send(api, sync, weights, version):
    """Send weights between two turns."""
    await api.pause("drain")
    try:
        await sync.send([api], weights, version)
        await api.drop_cache()
    finally:
        await api.resume()


@pytest.mark.parametrize("way", WAYS)
def test_weights_arrive_completely(server, make, tied_model, way):
    async def scenario(api):
        sync, model = make(way), load_model(tied_model)
        for _ in range(2):
            version = next(versions)
            await send(api, sync, named_weights(changed(model, seed=version)), version)
            await check(api, model, version)
        await sync.close()

    server.ask(scenario)


@pytest.mark.parametrize("sync_class", [DistributedSync, TensorSync])
def test_an_update_may_have_many_small_parts(engine, server, tied_model, sync_class):
    async def scenario(api):
        sync = sync_class(CONFIGS[engine](sync_timeout=60.0), FullWeights(str(tied_model), "float32"), bucket=50_000)
        model, version = changed(load_model(tied_model), seed=77), next(versions)
        await send(api, sync, named_weights(model), version)
        await check(api, model, version)
        await sync.close()

    server.ask(scenario)


@pytest.mark.parametrize("way", ["disk", "distributed"])
def test_adapters_arrive_merged(server, make, tied_model, way):
    async def scenario(api):
        module = add_adapters(load_model(tied_model), ModelConfig(lora_rank=4, lora_alpha=8))
        changed_adapters = adapter_state(module)
        for value in changed_adapters.values():
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
        sync, version = make(way, lora_scaling=scaling_of(module)), next(versions)
        await send(api, sync, changed_adapters, version)
        plain = load_model(tied_model)
        LoraWeights(scaling_of(module), LoraWeights.of(module).matrices)(plain, changed_adapters)
        await check(api, plain, version)
        await sync.close()

    server.ask(scenario)


@pytest.mark.parametrize("way", WAYS)
def test_an_update_works_after_an_interrupted_one(server, make, tied_model, way):
    """The trainer may have been cut off between any two steps."""

    async def scenario(api):
        sync, model = make(way), changed(load_model(tied_model), seed=99)
        await api.begin_update()
        version = next(versions)
        await send(api, sync, named_weights(model), version)
        await check(api, model, version)
        await sync.close()

    server.ask(scenario)


def test_changes_are_applied_to_the_kept_weights(engine, server, tied_model, caplog):
    if engine == "sglang":
        pytest.skip("SGLang loads whole tensors only")

    async def scenario(api):
        settings = VllmConfig(weight_sync="distributed", sync_delta=True, sync_timeout=60.0)
        sync, disk = (
            make_sync(one, model=str(tied_model), dtype="float32", lora_scaling=None)
            for one in (settings, VllmConfig())
        )
        model, sizes = load_model(tied_model), []
        whole = sum(value.nbytes for value in named_weights(model).values())
        for _ in range(3):
            version = next(versions)
            with torch.no_grad():
                model.model.norm.weight += 0.1
                model.model.layers[1].mlp.up_proj.weight[::7, 5] *= -1
                model.model.embed_tokens.weight[version::40] += 0.1
            await send(api, sync, named_weights(model), version)
            await check(api, model, version)
            sizes.append(sync.sent_bytes)
        assert sizes[0] == whole and max(sizes[1:]) < whole / 20, sizes
        version = next(versions)
        await send(api, disk, named_weights(changed(model, seed=3)), version)
        await check(api, model, version)
        assert not caplog.text
        version = next(versions)  # the files have replaced the weights that the server kept
        await send(api, sync, named_weights(changed(model, seed=4)), version)
        await check(api, model, version)
        assert "this worker keeps no weights, and the changes are from version" in caplog.text
        caplog.clear()
        weights = named_weights(changed(model, seed=5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mtrl.engines.server.weight_parts.find_changes", lost_change)
            version = next(versions)
            await send(api, sync, weights, version)
        assert "checksum" in caplog.text and sync.sent_bytes > whole
        await check(api, model, version)
        await sync.close()
        await disk.close()

    server.ask(scenario)


def test_corrupted_weights_are_refused(engine, server, make, tied_model, monkeypatch):
    if engine == "sglang":
        pytest.skip("SGLang computes no checksum of received weights; the canary detects wrong ones")

    async def scenario(api):
        model, sync = load_model(tied_model), make("disk")
        with monkeypatch.context() as patch:
            patch.setattr("mtrl.engines.server.disk_sync.checksum", lambda _: "0" * 64)
            with pytest.raises(SyncError, match="checksum"):
                await send(api, sync, named_weights(model), next(versions))
        version = next(versions)
        await send(api, sync, named_weights(model), version)
        await check(api, model, version)
        await sync.close()

    server.ask(scenario)
