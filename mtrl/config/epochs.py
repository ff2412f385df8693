"""The length of a run: a number of steps, or of passes over its training rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mtrl.config.schema import Config
from mtrl.errors import UserError

EPOCHS, STEPS = "trainer.epochs", "trainer.max_steps"


def check_length(overrides: Sequence[str]) -> None:
    """Refuse a command that gives both lengths: one of them would have no effect.

    Raises:
        UserError: it does.
    """
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    if EPOCHS in given and STEPS in given and given[EPOCHS] != "null":
        raise UserError(
            f"{EPOCHS}={given[EPOCHS]} and {STEPS}={given[STEPS]} both say how long the run is; leave one of them out"
        )


def with_steps(config: Config, rows: int) -> Config:
    """The configuration with its length in steps: where `trainer.epochs` is set, the fewest that draw `rows` training
    rows so often. Rows that dynamic sampling or a failed group draws besides are not counted.

    Raises:
        UserError: the critic would warm up for the whole run.
    """
    trainer = config.trainer
    if trainer.epochs is None:
        return config
    steps = max(1, math.ceil(trainer.epochs * rows / trainer.prompts_per_step))
    critic = config.algorithm.critic
    if critic is not None and critic.warmup_steps >= steps:
        raise UserError(
            f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves the policy nothing of "
            f"{EPOCHS}={trainer.epochs:g}, which is {steps} steps with {rows} training rows; lower the first or raise "
            "the second"
        )
    return replace(config, trainer=replace(trainer, max_steps=steps, epochs=None))
