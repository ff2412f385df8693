"""Finds the interpreters of the real engines."""

import os

import pytest

from mtrl.config.derived import engine_python as find_python
from mtrl.errors import UserError


def engine_python(name: str) -> str:
    """Return the interpreter of an engine. Without one the test is skipped; with a wrong variable it fails."""
    try:
        return find_python(name, None)
    except UserError:
        if os.environ.get(f"MTRL_{name.upper()}_PYTHON"):
            raise
        pytest.skip(f"{name} is not installed; install it with: python scripts/install_engine.py {name}")
