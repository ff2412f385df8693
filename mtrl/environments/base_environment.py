"""`BaseEnvironment` under the module name from which the Multi-Turn Training Guide imports it."""

from mtrl.environments.base import BaseEnvironment

__all__ = ["BaseEnvironment"]
