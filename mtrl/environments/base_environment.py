"""`BaseEnvironment` where the Multi-Turn Training Guide imports it from."""

from mtrl.environments.base import BaseEnvironment

__all__ = ["BaseEnvironment"]
