"""Helpers for tests of adapters: they import a framework, or use a copy of its interface."""

import pytest


def real(module, extra):
    """Return the module of a framework, or skip the test with the command that installs it."""
    return pytest.importorskip(module, reason=f"needs pip install 'mtrl-agents[{extra}]'")


def of_both(copy, module, extra):
    """Return a fixture with two parameters: `copy`, a module with the interface of a framework, and the framework."""

    @pytest.fixture(params=["copy", "real"])
    def framework(request):
        return copy if request.param == "copy" else real(module, extra)

    return framework


def observed(trajectory):
    """Return the texts of the environment: the opening, then the observation of each turn."""
    turns = [turn.observation for turn in trajectory.turns] + [trajectory.final_observation]
    return [[message["content"] for message in messages] for messages in turns]
