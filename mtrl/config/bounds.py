"""Check of the numbers of a configuration against the bounds of their keys, which the schema declares."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mtrl.config.keys import all_keys
from mtrl.errors import UserError


def check_bounds(cfg: DictConfig) -> None:
    """Check that each number of the configuration lies within its bounds.

    Raises:
        UserError: a number is out of bounds; the message names the key, the value and the bound.
    """
    for path, key in all_keys().items():
        value = OmegaConf.select(cfg, path) if key.bound else None
        if key.bound and value is not None and (broken := key.bound.broken_by(value)):
            raise UserError(f"{path}={value} must be {broken}{f' ({key.bound.why})' if key.bound.why else ''}")
