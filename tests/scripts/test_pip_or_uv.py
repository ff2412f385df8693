"""The installer of packages: uv where it can be installed, otherwise pip, and compilation only if it saves time."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "pip_or_uv.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("pip_or_uv_under_test", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("has_uv", [True, False])
@pytest.mark.parametrize("stores", [True, False])
def test_uv_is_tried_first_and_pip_otherwise(script, monkeypatch, has_uv, stores):
    ran = []
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if stores else "1")
    monkeypatch.setattr(script, "pip_settings", lambda python: {})
    monkeypatch.setattr(script, "attempt", lambda command, *rest: ran.append(command) or (None if has_uv else "no uv"))
    monkeypatch.setattr(
        script.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=5)
    )
    assert script.main(["torch==2.13.0"]) == (0 if has_uv else 5)
    assert ran[0] == [sys.executable, "-m", "pip", "install", "--quiet", "uv"] and len(ran) == 2
    assert ran[1][-1] == "torch==2.13.0" and (ran[1][2] == "uv") == has_uv
    compiled = {"--compile-bytecode", "--compile"} & set(ran[1])
    assert bool(compiled) == (not stores)
