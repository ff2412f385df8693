"""What runs inside SGLang's environment, as far as it needs no SGLang."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from mtrl.engines.sglang.platform import PLATFORM, activate
from mtrl.engines.sglang.secret import Secret

SETUP = Path(__file__).parents[3] / "setup.py"


def test_it_is_ours_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert activate() == PLATFORM


def test_it_is_inert_where_cuda_is_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None


def test_it_is_inert_where_sglangs_own_cpu_engine_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == PLATFORM


def test_sglang_finds_it_by_the_entry_point():
    line = '"sglang.srt.platforms": ["mtrl_cpu = mtrl.engines.sglang.platform:activate"]'
    assert line in SETUP.read_text(encoding="utf-8")
    assert import_module("mtrl.engines.sglang.platform").activate is activate


def test_a_secret_is_itself_and_does_not_show_in_logs():
    secret = Secret("abc")
    assert secret == "abc" and f"Bearer {secret}" == "Bearer abc"
    assert "abc" not in repr({"api_key": secret})


def run_alone(code):
    """In an interpreter of its own, for it changes PyTorch."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA has the operators of torchvision")
def test_the_names_of_torchvisions_operators_are_declared_once():
    run_alone(
        "import torch\n"
        "from mtrl.engines.sglang.operators import declare\n"
        "assert not hasattr(torch.ops.torchvision, 'nms')\n"
        "declare(); declare()\n"
        "assert hasattr(torch.ops.torchvision, 'nms') and hasattr(torch.ops.torchvision, 'qnms')\n"
    )


def test_pinned_memory_is_ordinary_memory():
    run_alone(
        "import torch\n"
        "from mtrl.engines.sglang.pinning import ignore_pinning\n"
        "ignore_pinning(); ignore_pinning()\n"
        "made = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True)\n"
        "assert made.tolist() == [1, 2] and made.dtype == torch.int32\n"
        "assert torch.empty((3,), pin_memory=True).shape == (3,) and torch.zeros(2).pin_memory().tolist() == [0, 0]\n"
    )
