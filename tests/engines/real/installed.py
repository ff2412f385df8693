"""Where the real engines are."""

import os

import pytest

from mtrl.config.derived import engine_python as find_python
from mtrl.errors import UserError


def engine_python(name: str) -> str:
    """The interpreter of an engine; the test is skipped where there is none, and fails where one is named in vain."""
    try:
        return find_python(name, None)
    except UserError:
        if os.environ.get(f"MTRL_{name.upper()}_PYTHON"):
            raise
        pytest.skip(f"{name} is not installed; install it with: python scripts/install_engine.py {name}")
