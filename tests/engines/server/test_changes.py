"""Changes of a tensor, applied to the old one, give the new one bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.server import changes
from mtrl.engines.server.changes import (
    apply_changes,
    decoded_positions,
    find_changes,
    message_of,
    message_size,
    position_codes,
)

INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.bool: torch.uint8,
}


def bits(value):
    return value.reshape(-1).view(INTEGERS.get(value.dtype, value.dtype))


def transferred(new, old):
    """Return the layout of the changes, and a copy of `old` to which they were applied; None: from whole tensors."""
    found, pieces = find_changes("w", new, old)
    message = message_of(pieces, "cpu")
    assert message.nbytes == message_size([found]) and found.nbytes <= new.nbytes
    target = torch.empty_like(new, memory_format=torch.contiguous_format) if old is None else old.clone()
    apply_changes(changes.TensorChanges.from_json(found.to_json()), message.numpy()[: found.nbytes], target)
    assert target.dtype == new.dtype and target.shape == new.shape
    assert torch.equal(bits(target), bits(new))
    return found


@st.composite
def pairs(draw):
    """Return an old and a new tensor of random bit patterns, NaN among them, that differ in any number of elements."""
    shape = draw(st.sampled_from([(), (0,), (1,), (3, 0), (2,), (7, 5), (40, 30)]))
    dtype, seed = draw(st.sampled_from(list(INTEGERS))), draw(st.integers(0, 2**31))
    share = draw(st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    old = torch.randint(0, high, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    drawn = torch.randint(0, high, old.shape, generator=generator, dtype=torch.uint8)
    is_new = torch.rand(shape, generator=generator) < share
    new = torch.where(is_new.unsqueeze(-1), drawn, old)
    return tuple(value.view(dtype).reshape(shape) for value in (new, old))


@given(pairs(), st.sampled_from([1, 7, 64, 2**22]))
def test_changes_give_the_new_tensor_bit_for_bit(pair, chunk):
    new, old = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "CHUNK", chunk)
        found = transferred(new, old)
        assert transferred(new, None).changed == new.numel()
    if found.width:
        assert found.changed == int((bits(new) != bits(old)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signs_of_zero_and_payloads_of_nan_are_changes(dtype):
    integer = INTEGERS[dtype]
    nan = bits(torch.tensor([float("nan")], dtype=dtype))[0].item()
    old = torch.zeros(1000, dtype=integer)
    old[500] = nan
    new = old.clone()
    new[500] = nan + 1
    new = new.view(dtype)
    new[3] = -0.0
    found = transferred(new, old.view(dtype))
    assert (found.changed, found.width) == (2, 2)
    assert transferred(old.view(dtype), old.view(dtype)).nbytes == 0  # NaN has not changed, although NaN != NaN


@given(st.lists(st.integers(0, 200_000), unique=True, max_size=20).map(sorted), st.sampled_from([1, 2]))
def test_codes_mean_what_their_format_says(positions, width):
    codes = position_codes(np.array(positions, np.int64), -1, width)
    largest, at, found = 256**width - 1, -1, []
    for code in codes.tolist():  # the format, read one code at a time
        at += code
        if code < largest:
            at += 1
            found.append(at)
    assert found == positions
    assert [int(p) for part in decoded_positions(codes) for p in part] == positions


def test_positions_take_one_byte_each_where_changes_are_dense_and_two_where_they_are_rare():
    assert position_codes(np.array([0, 1, 256, 512]), -1, 1).tolist() == [0, 0, 254, 255, 0]
    assert position_codes(np.array([65_536, 65_537 + 131_072]), -1, 2).tolist() == [65535, 1, 65535, 65535, 2]
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    for step, width, codes in ((10, 1, 10_000), (2_000, 2, 50)):
        new = old.clone()
        new[::step] = 1
        found = transferred(new, old)
        assert (found.width, found.codes, found.nbytes) == (width, codes, (width + 2) * codes)
    new = old.clone()
    new[: 2 * len(old) // 3 + 1] = 1  # three bytes for each change are more than two for each element
    found = transferred(new, old)
    assert (found.width, found.nbytes) == (0, old.nbytes)


def test_a_view_that_is_not_contiguous_is_read_in_its_own_order():
    new = torch.arange(12.0).reshape(3, 4).t()
    assert transferred(new, torch.zeros(4, 3)).shape == (4, 3)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"w was torch.float32 \(2,\), and is torch.float32 \(3,\)"):
        find_changes("w", torch.zeros(3), torch.zeros(2))


def damaged(layout, message):
    yield layout, message[:-1], "bytes are no changes"
    yield {**layout, "shape": [10]}, message, "bytes are no changes"
    yield {**layout, "codes": layout["codes"] - 1}, message[1:], "20 values of .* have 19 positions"
    yield {**layout, "width": 4}, message, "no changes"
    yield {**layout, "width": 0, "codes": 0}, message[layout["codes"] :], "have no positions"
    skips_only, too_far = message.copy(), message.copy()
    skips_only[layout["codes"] - 1] = 255  # the last code then skips elements and changes none
    yield layout, skips_only, "20 values of .* have 19 positions"
    too_far[: layout["codes"]] = 200
    yield layout, too_far, "beyond its end"


def test_a_damaged_message_is_refused():
    old = torch.zeros(1000, dtype=torch.bfloat16)
    new = old.clone()
    new[5::50] = 1
    found, pieces = find_changes("w", new, old)
    message = message_of(pieces, "cpu").numpy()
    for layout, content, words in damaged(found.to_json(), message):
        with pytest.raises(ValueError, match=words):
            apply_changes(changes.TensorChanges.from_json(layout), content, old.clone())
