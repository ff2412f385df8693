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
    engine = LocalEngine(make_lm(), None, 4, 64, fused)
    found, reads = [], Counter()

    def counted(name, method):
        def call(tensor, *args, **kwargs):
            reads[name] += 1
            return method(tensor, *args, **kwargs)

        return call

    plain = engine._decode

    def decode():
        with monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
            reads.clear()
            plain()
        if engine._batch is not None and not engine._batch.ended:
            found.append(dict(reads))

    monkeypatch.setattr(engine, "_decode", decode)

    async def go():
        for i in range(3):
            engine.open(str(i))
        turns = [engine.generate(str(i), [1, 2, i], SamplingParams(20, seed=i)) for i in range(3)]
        return await asyncio.gather(*turns)

    answers = asyncio.run(go())
    assert all(len(answer.logprobs) == len(answer.token_ids) == 20 for answer in answers)
    assert len(found) >= 18 and all(each == {"cpu": 1, "numpy": 1} for each in found), found
