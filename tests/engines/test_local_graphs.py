"""The runner with CUDA graphs, with an eager call in the place of the graph: rounding, fillers, and invalid graphs. The
self-test of the doctor runs real graphs (`local graphs`)."""

import random
import weakref

import pytest
import torch

from mtrl.engines.local import engine, graphs
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.fused import FusedRunner
from mtrl.engines.local.graphs import CudaRunner, GraphRunner, rounded_rows, rounded_width


class EagerGraph:
    """Repeats the captured work as a graph does: with the same tensors."""

    made, alive = 0, None
    """Number of the graphs that a test has made, and the set of those that exist."""

    def __init__(self, work, pool, device):
        self.replay = work
        type(self).made += 1
        self.alive.add(self)

    def pool(self):
        return "pool"


@pytest.fixture(autouse=True)
def eager_graphs(monkeypatch):
    monkeypatch.setattr(graphs, "captured", EagerGraph)
    monkeypatch.setattr(EagerGraph, "made", 0)
    monkeypatch.setattr(EagerGraph, "alive", weakref.WeakSet())


def test_rounded_sizes():
    assert [rounded_rows(n) for n in (1, 2, 7, 8, 9, 16, 17, 33, 61, 64, 65, 130)] == [
        1, 2, 7, 8, 9, 16, 18, 36, 64, 64, 72, 144
    ]  # fmt: skip
    assert [rounded_width(n) for n in (1, 128, 129, 500, 1024, 1025, 2049, 5000)] == [
        128, 128, 256, 512, 1024, 1280, 2560, 5120
    ]  # fmt: skip
    assert all(n <= rounded_rows(n) <= n * 9 / 8 for n in range(1, 5000))
    assert all(n <= rounded_width(n) <= max(n + 127, n * 5 / 4) for n in range(1, 5000))


@pytest.mark.parametrize("kind", [CudaRunner, GraphRunner])
@pytest.mark.parametrize("deterministic", [True, False])
def test_an_engine_samples_the_same_tokens(kind, deterministic, tiny_model, sample_turns, monkeypatch):
    """Prompts and turns have different lengths, so that rows leave and return while others decode."""
    draw = random.Random(0)
    prompts = [[draw.randrange(300) for _ in range(draw.choice([2, 5, 30, 100]))] for _ in range(9)]
    expected = sample_turns(LocalEngine(tiny_model, None, 5, 200, True, deterministic), prompts)
    monkeypatch.setattr(engine, "make_runner", lambda model, *_: kind(model))
    found = sample_turns(LocalEngine(tiny_model, None, 5, 200, True, deterministic), prompts)
    assert expected.keys() == found.keys()
    for trajectory, turns in expected.items():
        for one, other in zip(turns, found[trajectory], strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert (EagerGraph.made > 0) == (kind is GraphRunner)


@torch.inference_mode()
def test_fillers_change_no_other_row(tiny_model):
    runner, plain = GraphRunner(tiny_model), FusedRunner(tiny_model)
    ids = torch.randint(50, (11, 20), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((11,), 20)
    for one in (runner, plain):
        one.cache.fit(11, 40)
        one.forward(ids, torch.zeros(11, dtype=torch.long), lengths, 0, 20)
    held = [block[:11].clone() for block in (*runner.cache.keys, *runner.cache.values)]
    for rows in (9, 3, 9):  # nine of ten rows of a graph, and fewer
        logits = runner.forward(ids[:rows, :1], lengths[:rows], torch.ones(rows, dtype=torch.long), 0, 21)
        expected = plain.forward(ids[:rows, :1], lengths[:rows], torch.ones(rows, dtype=torch.long), 0, 21)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    after = [block[:11] for block in (*runner.cache.keys, *runner.cache.values)]
    for before, now in zip(held, after, strict=True):
        assert torch.equal(before[:, :, :20], now[:, :, :20]), "tokens of the prompts"
        assert torch.equal(before[9:], now[9:]), "rows that no step fed"


@torch.inference_mode()
def test_graphs_are_made_again_when_their_memory_is_replaced(tiny_model):
    runner, one = GraphRunner(tiny_model), torch.ones(2, dtype=torch.long)

    def step(width):
        runner.forward(torch.ones(2, 1, dtype=torch.long), one * (width - 1), one, 0, width)
        return EagerGraph.made

    runner.cache.fit(2, 200)
    assert [step(5), step(6), step(128), step(129), step(7)] == [1, 1, 1, 2, 2]
    assert len(EagerGraph.alive) == 2
    runner.cache.fit(2, 600)
    assert step(5) == 3, "the cache has moved"
    runner.refresh()
    assert step(5) == 3, "weights change in place"
    runner.cache.reserve(9, 10)
    assert [step(5), len(EagerGraph.alive)] == [4, 1], "old graphs are discarded"


@torch.inference_mode()
def test_a_cache_of_another_size_at_the_same_addresses_needs_new_graphs(tiny_model, monkeypatch):
    runner, one = GraphRunner(tiny_model), torch.ones(2, dtype=torch.long)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    for capacity, made in ((300, 1), (300, 1), (100, 2)):
        runner.cache.fit(2, capacity)
        runner.forward(torch.ones(2, 1, dtype=torch.long), one, one, 0, 2)
        assert EagerGraph.made == made
