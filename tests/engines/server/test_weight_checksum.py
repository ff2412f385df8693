"""Two sets of weights have the same checksum if they are the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.server.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    value = torch.randint(0, 2**31, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    return value.to(draw(st.sampled_from(DTYPES)))


weights = st.dictionaries(st.text("abc.", min_size=1, max_size=4), tensors(), min_size=1, max_size=4)


@given(weights)
def test_the_checksum_ignores_order_and_memory_layout(state):
    backwards = {name: value.clone().t().contiguous().t() if value.ndim == 2 else value.clone()
                 for name, value in reversed(state.items())}  # fmt: skip
    assert checksum(state) == checksum(backwards)


@given(weights, st.data())
def test_the_checksum_covers_bytes_names_dtypes_and_shapes(state, data):
    word, name = checksum(state), data.draw(st.sampled_from(sorted(state)))
    value = state[name]
    others = [{**state, "new": value}, {other: v for other, v in state.items() if other != name} | {name + "x": value}]
    others += [{**state, name: value.reshape(1, *value.shape)}]
    others += [{**state, name: value.view(torch.int32)}] if value.dtype == torch.float32 else []
    if value.numel():
        changed = value.clone().reshape(-1)
        raw, at = changed.view(torch.uint8), data.draw(st.integers(0, value.nbytes - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7 if value.dtype != torch.bool else 0))
        others += [{**state, name: changed.reshape(value.shape)}]
    assert word not in [checksum(other) for other in others]


@pytest.mark.parametrize("size", [4096 * 2 - 1, 4096 * 2, 4096 * 64 + 3])
def test_the_checksum_covers_all_of_a_large_tensor(size):
    value = torch.randn(size)
    words = {checksum({"w": value})}
    for change in (lambda v: v.neg_(), lambda v: v.flip(0), lambda v: v.roll(1), lambda v: v.roll(4096)):
        words.add(checksum({"w": change(value.clone())}))
    for spots in ([0], [size - 1], [1, 3], [0, size - 1]):  # signs of two words of eight bytes: their top bits
        value = value.clone()
        value[spots] *= -1
        words.add(checksum({"w": value}))
    assert len(words) == 9


def test_the_checksum_is_the_same_in_every_process():
    """The constant is from another process."""
    found = checksum({"v": torch.ones(3, dtype=torch.bfloat16), "w": torch.arange(9000.0)})
    assert found == "2f36db8e37afba69f910a938d4f29050ac8d261e5986a0cb00bf71f71f9921fe"
