"""Stand-ins show which tensors of files a tensor consists of."""

import pytest
import torch

from mtrl.models.stand_ins import StandIns
from mtrl.models.stored_tensors import FileTensor, concatenate, stack

FILES = {name: FileTensor("file", name, (2**20, 2**20)) for name in "abcd"}
"""Tensors of 4 TiB."""


@pytest.fixture
def stand_ins():
    return StandIns(FILES, torch.float32)


def test_joined_stand_ins_have_no_memory_and_are_known(stand_ins):
    a, b, c, d = stand_ins.state.values()
    with stand_ins:
        gate, up = torch.stack([a, b]), torch.stack(tensors=[c, d], dim=0)
        found = torch.cat([gate, up], dim=-1)
    assert found.shape == (2, 2**20, 2**21) and found.untyped_storage().nbytes() == 4
    files = [*FILES.values()]
    assert stand_ins.represented(found) == concatenate([stack(files[:2]), stack(files[2:])], 2)
    assert stand_ins.represented(torch.nn.Parameter(a)) == FILES["a"]


def test_a_cast_has_no_memory_and_is_known(stand_ins):
    a, *_ = stand_ins.state.values()
    with stand_ins:
        half, same, elsewhere = a.to(dtype=torch.bfloat16), a.to("cpu", torch.float32), a.to("meta")
    assert half.dtype == torch.bfloat16 and half.shape == a.shape and half.untyped_storage().nbytes() == 2
    assert stand_ins.represented(half) == FILES["a"] and same is a and stand_ins.represented(elsewhere) is None


def test_other_tensors_are_not_known(stand_ins):
    a, *_ = stand_ins.state.values()
    small = StandIns({"a": FileTensor("file", "a", (2, 3))}, torch.float32)
    value = small.state["a"]
    with small:
        others = [torch.stack([value], 1), torch.stack([value, torch.ones(2, 3)]), torch.cat([torch.ones(2, 3)])]
        copied = torch.stack([value + 1, value.clone()])
    assert all(small.represented(other) is None for other in (*others, copied, value.T, value[:1], a))
    assert torch.stack([value]).untyped_storage().nbytes() == 24, "outside of the context it has memory"


def test_tensors_of_other_shapes_are_not_joined(stand_ins):
    a, *_ = stand_ins.state.values()
    with stand_ins, pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch.stack([a, a[:1].expand(2**20, 2**20)[:, :1].expand(2**20, 2**20), torch.cat([a, a])])
