"""The GPUs that a process may use, by CUDA_VISIBLE_DEVICES and device files."""

import re

import pytest

from mtrl.errors import UserError
from mtrl.utils import gpus

MIG = "MIG-12345678-9abc-def0-1234-56789abcdef0"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4,5,6,7", ["4", "5", "6", "7"]),
        (f" GPU-8932f937, {MIG} ", ["GPU-8932f937", MIG]),
        ("1,-1,2", ["1"]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_entries_of_the_variable(monkeypatch, value, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus.listed_gpus() == expected


@pytest.mark.parametrize(
    ("value", "indices", "expected"),
    [
        (None, [2, 3], ["2", "3"]),
        ("4,5,6,7", [3], ["7"]),
        (f"GPU-8932f937,{MIG},GPU-1", [2, 1], ["GPU-1", MIG]),
    ],
)
def test_a_child_gets_the_entries_of_its_parent(monkeypatch, value, indices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus.gpu_names(indices) == expected


def test_too_few_entries_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="GPU 3 is needed, and CUDA_VISIBLE_DEVICES=4,5 lists 2 GPUs"):
        gpus.gpu_names([0, 3])


@pytest.mark.parametrize(
    ("value", "files", "expected"),
    [
        (None, [], None),
        (None, ["nvidiactl", "nvidia-uvm"], None),
        (None, ["nvidiactl", "nvidia1", "nvidia0"], "this machine has the GPU .*/nvidia0"),
        ("", ["nvidia0"], None),
        ("-1", ["nvidia0"], None),
        ("0,1", [], "CUDA_VISIBLE_DEVICES=0,1 lists GPUs"),
    ],
)
def test_evidence_of_a_gpu(monkeypatch, tmp_path, value, files, expected):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = gpus.gpu_evidence()
    assert found is None if expected is None else re.fullmatch(expected, found)
