"""Checks of `generator.context`, the folds of a long context."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from mtrl.config.derived import runs_agent
from mtrl.config.rollout_schema import ContextConfig
from mtrl.rollout.folding import fold_of

READ_BY = {"threshold": ("keep_last", "summarise"), "keep_observations": ("keep_last",)}
"""The folds that read each key."""


def check_context(cfg: DictConfig) -> list[str]:
    """Check how the context is folded, as far as it does not depend on the model. Return warnings about settings
    without effect.

    Raises:
        UserError: See `fold_of`.
    """
    settings, default, key = cfg.generator.context, ContextConfig(), "generator.context"
    unread = [
        f"{key}.{name} has no effect with {key}.fold={settings.fold}"
        for name, folds in READ_BY.items()
        if settings[name] != getattr(default, name) and settings.fold not in folds
    ]
    if settings.fold != "none" and runs_agent(cfg):
        return [*unread, f"{key}.fold={settings.fold} has no effect: a program decides what its calls contain"]
    fold_of(cfg.generator, cfg.generator.max_context_length or sys.maxsize)
    return unread
