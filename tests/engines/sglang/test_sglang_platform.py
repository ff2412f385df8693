"""Modules that run inside SGLang's environment, as far as they need no SGLang."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from mtrl.engines.sglang.access import Secret
from mtrl.engines.sglang.platform import PLATFORM, activate
from tests import forked

SETUP = Path(__file__).parents[3] / "setup.py"


def test_the_platform_applies_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert activate() == PLATFORM


def test_the_platform_does_not_apply_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None


def test_the_platform_does_not_apply_if_the_cpu_engine_of_sglang_is_requested(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == PLATFORM


def test_sglang_finds_the_platform_by_its_entry_point():
    line = '"sglang.srt.platforms": ["mtrl_cpu = mtrl.engines.sglang.platform:activate"]'
    assert line in SETUP.read_text(encoding="utf-8")
    assert import_module("mtrl.engines.sglang.platform").activate is activate


def test_the_repr_of_a_secret_is_redacted():
    secret = Secret("abc")
    assert secret == "abc" and f"Bearer {secret}" == "Bearer abc"
    assert "abc" not in repr({"api_key": secret})


def run_alone(code):
    """Run code in a separate process, because it patches PyTorch."""
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch with CUDA has the operators of torchvision")
def test_operators_of_torchvision_are_declared_once():
    run_alone(
        "import torch\n"
        "from mtrl.engines.sglang.platform import declare_operators\n"
        "assert not hasattr(torch.ops.torchvision, 'nms')\n"
        "declare_operators(); declare_operators()\n"
        "assert hasattr(torch.ops.torchvision, 'nms') and hasattr(torch.ops.torchvision, 'qnms')\n"
    )


def test_pinned_memory_is_ordinary_memory():
    run_alone(
        "import torch\n"
        "from mtrl.engines.sglang.platform import ignore_pinning\n"
        "ignore_pinning(); ignore_pinning()\n"
        "made = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True)\n"
        "assert made.tolist() == [1, 2] and made.dtype == torch.int32\n"
        "assert torch.empty((3,), pin_memory=True).shape == (3,) and torch.zeros(2).pin_memory().tolist() == [0, 0]\n"
    )
