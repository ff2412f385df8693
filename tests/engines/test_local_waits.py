"""How often the embedded engine waits for the device while it decodes. A GPU works on while Python only starts kernels,
and idles after each wait."""

import asyncio
from collections import Counter

import pytest
import torch

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from tests.distributed.sharded_models import make_lm

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__float__", "__index__")
"""Methods of a tensor that wait for a GPU."""


@pytest.mark.parametrize("fused", [True, False])
def test_a_token_of_all_rows_waits_once_for_their_ids(fused, monkeypatch):
    """The reads between two steps of the model with one token per row. All rows end with the same token."""
    engine = LocalEngine(make_lm(), None, 4, 64, fused)
    found, reads, steps, forward = [], Counter(), [], engine.runner.forward

    def counted(name, method):
        def call(tensor, *args, **kwargs):
            reads[name] += 1
            return method(tensor, *args, **kwargs)

        return call

    def step(ids, *args):
        if steps and steps[-1] == ids.shape[1] == 1:
            found.append(dict(reads))
        steps.append(ids.shape[1])
        reads.clear()
        return forward(ids, *args)

    monkeypatch.setattr(engine.runner, "forward", step)

    async def go():
        for i in range(3):
            engine.open(str(i))
        turns = [engine.generate(str(i), [1, 2, i], SamplingParams(20, seed=i)) for i in range(3)]
        with monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
            return await asyncio.gather(*turns)

    answers = asyncio.run(go())
    assert all(len(answer.logprobs) == len(answer.token_ids) == 20 for answer in answers)
    assert len(found) == 18 and all(each == {"cpu": 1, "numpy": 1} for each in found), found
