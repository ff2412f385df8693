"""A job for the managed service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from mtrl.sagemaker.schema import ManagedConfig


@dataclass(frozen=True)
class ManagedJob:
    """A training job or an evaluation for the service."""

    settings: ManagedConfig
    cfg: DictConfig
    hyperparameters: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def evaluates(self) -> bool:
        return self.settings.evaluate is not None

    @property
    def folder(self) -> str:
        return f"s3://{self.settings.bucket}/{self.settings.prefix}/{self.cfg.name}"
