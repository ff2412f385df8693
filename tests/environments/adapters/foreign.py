"""Frameworks in the tests: the real package where it is installed, a copy of its interface where it is too heavy."""

import pytest


def real(module, extra):
    """The module of a framework; without it the test is skipped, and says how to get it."""
    return pytest.importorskip(module, reason=f"needs pip install 'mtrl-agents[{extra}]'")


def of_both(copy, module, extra):
    """A fixture that gives `copy`, a class that repeats a framework's interface, then the framework's own module."""

    @pytest.fixture(params=["copy", "real"])
    def framework(request):
        return copy if request.param == "copy" else real(module, extra)

    return framework


def said(trajectory):
    """What the environment said, turn by turn: the opening first, the last observation last."""
    turns = [turn.observation for turn in trajectory.turns] + [trajectory.final_observation]
    return [[message["content"] for message in messages] for messages in turns]
