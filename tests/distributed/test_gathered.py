"""Weights that are gathered over ranks bucket by bucket, while an engine reads them."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_models import make_lm
from torch.distributed.tensor import DTensor

from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.gathered import GatheredWeights, layout_of
from mtrl.distributed.sharding import full_state, shard
from mtrl.engines.local.block import Block
from mtrl.engines.local.engine import LocalEngine, copy_weights
from mtrl.engines.server.update import Weights
from mtrl.trainer.update.policy import Policy

LIMIT = 10_000
"""Maximum size of a bucket, in bytes: a few tensors of a layer, and less than a layer."""
CASES = {"plain": (None, False), "tied": (None, True), "bfloat16": (torch.bfloat16, False)}
"""Dtype of the engine, and whether the embeddings are tied."""


class Alive:
    """Counts the bytes of whole tensors that exist at the same time."""

    def __init__(self):
        self.bytes = self.peak = 0

    def count(self, whole):
        self.bytes += whole.nbytes
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(whole, self._free, whole.nbytes)
        return whole

    def counting(self, gather):
        return lambda value: self.count(gather(value))

    def _free(self, size):
        self.bytes -= size


def streamed(policy, alive=None):
    """Return the weights as every rank of a rank group would gather them; `alive` counts the copies of a module that is
    not sharded."""

    def gather(names):
        found = policy.weights(names) or dict.fromkeys(names)
        return found if alive is None else {name: alive.count(value) for name, value in found.items()}

    return GatheredWeights(policy.layout(), gather, LIMIT)


def peaks(rank):
    """Copy weights into another model, bucket by bucket and whole. Return for each case both results, both peaks, and
    the number and the bytes of the tensors."""
    found = {}
    world = SimpleNamespace(rank=rank, size=dist.get_world_size())
    for case, (dtype, tied) in CASES.items():
        policy = Policy(shard(make_lm(tied), FsdpConfig(), world), None, sent_dtype=dtype)
        with pytest.MonkeyPatch.context() as patch:
            whole, parts = Alive(), Alive()
            gather = DTensor.full_tensor
            patch.setattr(DTensor, "full_tensor", whole.counting(gather))
            expected = policy.weights()
            patch.setattr(DTensor, "full_tensor", parts.counting(gather))
            weights = streamed(policy)
            engine = make_lm(tied, seed=1).to(dtype)
            if rank == 0:
                copy_weights(engine, weights)
            else:
                for name in weights:
                    weights[name]
        sizes = {name: value.nbytes for name, value in weights.layout.items()}
        found[case] = {"expected": expected, "engine": engine.state_dict(), "peaks": (whole.peak, parts.peak)}
        found[case]["sizes"] = sizes
    return found


def test_a_copy_of_the_weights_needs_one_bucket_at_a_time_and_has_the_same_bits(tmp_path):
    found, other = run_ranks(2, peaks, tmp_path)
    for case, (dtype, tied) in CASES.items():
        each, sizes = found[case], found[case]["sizes"]
        assert each["expected"].keys() == sizes.keys() and ("lm_head.weight" in sizes) != tied
        for name, value in each["expected"].items():
            assert value.dtype == (dtype or torch.float32)
            assert torch.equal(each["engine"][name], value), (case, name)
        whole, parts = each["peaks"]
        assert whole == sum(sizes.values()) > 4 * LIMIT, "the test has several buckets"
        assert parts <= max(LIMIT, *sizes.values()) == LIMIT
        assert other[case]["peaks"][1] <= max(sizes.values()), "a rank that sends its slices holds one tensor"


def test_a_bucket_is_freed_before_the_next_one_is_gathered():
    alive, layout = Alive(), {str(i): torch.empty(4, device="meta") for i in range(7)}

    def gather(names):
        return {name: alive.count(torch.full((4,), float(name))) for name in names}

    weights = GatheredWeights(layout, gather, 2 * 16)
    assert [weights[name].tolist() for name in weights] == [[float(name)] * 4 for name in layout]
    assert alive.peak == 2 * 16 and layout_of(weights) is layout and len(weights) == 7
    single = GatheredWeights(layout, gather, 1)
    assert [single[name][0].item() for name in single] == list(range(7))


def test_every_receiver_reads_one_bucket_at_a_time():
    """The block of an engine's process, and the local engine. Servers' weights are kept, without a second copy."""
    policy = Policy(make_lm(), None)
    expected = full_state(policy.model)
    for receive in (into_block, into_store, into_engine):
        alive = Alive()
        received = receive(streamed(policy, alive))
        assert all(torch.equal(received[name], value) for name, value in expected.items()), receive.__name__
        most = sum(value.nbytes for value in expected.values()) if receive is into_store else LIMIT
        assert 0 < alive.peak <= most


def into_block(weights):
    block = Block.like(layout_of(weights))
    assert block.fits(layout_of(weights))
    block.write(weights)
    return block.tensors


def into_store(weights):
    stored = Weights.copy(weights, 1)
    assert stored.version == 1
    return stored.tensors


def into_engine(weights):
    import asyncio

    engine = LocalEngine(make_lm(seed=1), None, 2, 64)
    asyncio.run(engine.load_weights(weights, 3))
    assert engine.version == 3
    return engine.model.state_dict()


def test_weights_that_do_not_fit_are_refused_before_any_is_gathered():
    policy = Policy(make_lm(), None)
    layout = {name: value for name, value in policy.layout().items() if "norm" not in name}
    with pytest.raises(ValueError, match="no weights for"):
        copy_weights(make_lm(seed=1), GatheredWeights(layout, pytest.fail, LIMIT))
