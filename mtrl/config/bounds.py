"""Checks of a configuration's values against the bounds and words that the schema declares for their keys."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mtrl.config.choices import CHOICES
from mtrl.config.keys import all_keys
from mtrl.config.messages import unknown_choice
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


def check_choices(cfg: DictConfig) -> None:
    """Check that each key that takes one of a few words has one of them.

    Raises:
        UserError: a value is another word; the message names the key, the value and the words.
    """
    for path, words in CHOICES.items():
        value = OmegaConf.select(cfg, path)
        if value is not None and value not in words:
            raise unknown_choice(path, value, words)
