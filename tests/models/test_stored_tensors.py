"""Parts of tensors that consist of several tensors of files are those of the whole tensor."""

import itertools

import pytest
import torch
from safetensors.torch import save_file

from mtrl.errors import UserError
from mtrl.models import stored_tensors
from mtrl.models.stored_tensors import FileTensor, JoinedTensor, concatenate, stack

EXPERTS = 5


@pytest.fixture
def experts(tmp_path):
    """Return the stored tensors of a layer's experts in two files, by projection, and their values."""
    values = {f"{kind}.{i}": torch.randn(3, 4) for kind in ("gate", "up") for i in range(EXPERTS)}
    files = {name: tmp_path / f"{number % 2}.safetensors" for number, name in enumerate(values)}
    for file in {*files.values()}:
        save_file({name: value for name, value in values.items() if files[name] == file}, file)
    stored = {name: FileTensor(str(files[name]), name, (3, 4)) for name in values}
    return [[kept[f"{kind}.{i}"] for i in range(EXPERTS)] for kept in (stored, values) for kind in ("gate", "up")]


def ranges(size):
    return [slice(a, b) for a, b in itertools.combinations(range(size + 1), 2)]


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_every_part_is_that_of_the_whole_tensor(dimension, experts):
    gate, up, *values = experts
    joined = concatenate([stack(gate), stack(up)], dimension)
    whole = torch.cat([torch.stack(tensors) for tensors in values], dimension)
    assert joined.shape == whole.shape and torch.equal(joined.read(), whole)
    assert torch.equal(joined.read([slice(1, 3)]), whole[1:3]), "the other dimensions are whole"
    for part in itertools.product(*map(ranges, whole.shape)):
        if sum(rows.stop - rows.start for rows in part) % 3 == 0:  # a third of the parts takes half a second
            assert torch.equal(joined.read(part), whole[part]), part
    assert joined.read([slice(2, 2)]).shape == whole[2:2].shape


def test_experts_may_be_concatenated_before_they_are_stacked(experts):
    gate, up, gates, ups = experts
    joined = stack([concatenate(pair, 0) for pair in zip(gate, up, strict=True)])
    whole = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    assert torch.equal(joined.read(), whole) and torch.equal(joined.read([slice(1, 4), slice(2, 5)]), whole[1:4, 2:5])


def test_only_the_covered_tensors_are_read_and_a_file_is_opened_once(experts, monkeypatch):
    opened, read = [], []

    class Recording:
        def __init__(self, file, framework):
            opened.append(file)
            self.opened = safe_open(file, framework)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.opened.__exit__(*error)

        def get_slice(self, name):
            read.append(name)
            return self.opened.get_slice(name)

    safe_open = stored_tensors.safe_open
    monkeypatch.setattr(stored_tensors, "safe_open", Recording)
    gate, up, *_ = experts
    joined = concatenate([stack(gate), stack(up)], 1)
    joined.read([slice(1, 3), slice(0, 3)])
    assert sorted(read) == ["gate.1", "gate.2"] and len(opened) == 2
    joined.read([slice(0, 4), slice(0, 6), slice(0, 1)])
    assert len(read) == 2 + 8 and len(opened) == 4


def test_numbers_of_all_types_are_kept(tmp_path):
    values = [torch.tensor([1 / 3, 7e4]).bfloat16(), torch.tensor([1 / 3, 1.0]).half(), torch.tensor([1 / 3, 1e-40])]
    save_file({str(i): value for i, value in enumerate(values)}, tmp_path / "file")
    joined = stack([FileTensor(str(tmp_path / "file"), str(i), (2,)) for i in range(3)])
    assert torch.equal(joined.read(), torch.stack([value.float() for value in values]))


def test_a_missing_piece_is_an_error_that_names_it(experts):
    gate, *_ = experts
    lost = FileTensor(gate[2].file, "gate.9", (3, 4))
    joined = JoinedTensor((3, 3, 4), stack([*gate[:2], lost]).pieces)
    assert joined.read([slice(0, 2)]).shape == (2, 3, 4)
    with pytest.raises(UserError, match=r"gate\.9 cannot be read from .*\.safetensors \(.*gate\.9.*\); each"):
        joined.read([slice(1, 3)])
