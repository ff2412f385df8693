"""Optional packages of tests."""

import importlib.util

import pytest


def need(package, reason=None):
    """Skip the test module that calls this function if the package is not installed. Unlike `pytest.importorskip`, it
    does not import the package: each worker of pytest-xdist collects all modules, and runs a part of the tests only."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason or f"needs the package {package}", allow_module_level=True)
