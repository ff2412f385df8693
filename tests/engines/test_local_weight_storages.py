"""A sleeping engine: its weights take no memory, and turns wait for new weights, which are then all that counts."""

import asyncio

import pytest
import torch
from torch import nn

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.weight_storages import WeightStorages, own_storages

PROMPT = [5, 6, 7, 8, 9]


def stored_bytes(module):
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in module.parameters()}.values())


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [True, False])
def test_turns_wait_for_the_weights_that_follow_a_sleep(make_tiny_model, fuse, dtype, deterministic):
    make = make_tiny_model
    model, trained = make(0).to(dtype), make(1).to(dtype)
    engine = LocalEngine(model, None, fused_decode=fuse, deterministic=deterministic)
    sampling = SamplingParams(max_generate_length=6)

    async def go():
        before = await engine.generate("a", PROMPT, sampling)
        engine.release("a")
        await engine.sleep()
        turn = asyncio.create_task(engine.generate("b", PROMPT, sampling))
        for _ in range(20):
            await asyncio.sleep(0)
        assert stored_bytes(model) == 0 and not turn.done()
        await engine.wake()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not turn.done(), "the weights have no defined values yet"
        await engine.load_weights(trained.state_dict(), 1)
        other = LocalEngine(trained, None, fused_decode=fuse, deterministic=deterministic)
        return before, await turn, await other.generate("b", PROMPT, sampling)

    before, turn, expected = asyncio.run(asyncio.wait_for(go(), 30))
    assert (turn.token_ids, turn.logprobs) == (expected.token_ids, expected.logprobs)
    assert turn.logprobs != before.logprobs
    assert turn.version_spans == [(1, len(turn.token_ids))]


def test_tied_parameters_and_views_keep_one_storage():
    module = nn.ModuleList([nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)])
    module[1].weight = module[0].weight
    view, memory = module[0].weight.detach().t(), WeightStorages(module)
    memory.free()
    assert stored_bytes(module) == 0
    memory.allocate()
    with torch.no_grad():
        module[1].weight.copy_(torch.arange(32).view(8, 4))
    assert torch.equal(view, torch.arange(32.0).view(8, 4).t())


def test_parameters_of_a_mapped_file_keep_their_memory_until_they_own_it(tmp_path):
    torch.save({"weight": torch.ones(8, 4)}, tmp_path / "weights.pt")
    module = nn.Linear(4, 8, bias=False)
    module.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True, weights_only=True), assign=True)
    WeightStorages(module).free()
    assert torch.equal(module.weight, torch.ones(8, 4))
    own_storages(module)
    assert torch.equal(module.weight, torch.ones(8, 4))
    WeightStorages(module).free()
    assert stored_bytes(module) == 0
