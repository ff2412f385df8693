"""mtrl: reinforcement learning for language-model agents that act over many turns.

`mtrl.train`, `mtrl.evaluate` and `mtrl.load` are the functions of `mtrl/notebook.py`.
"""

from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = ("train", "evaluate", "load")


def __getattr__(name: str) -> Any:
    """Import the functions for notebooks at their first use, so that `import mtrl` stays cheap."""
    if name in _FUNCTIONS:
        from importlib import import_module

        return getattr(import_module("mtrl.notebook"), name)
    raise AttributeError(f"module 'mtrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS])
