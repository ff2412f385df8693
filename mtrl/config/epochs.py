"""The length of a run: a number of steps, or a number of passes over the training rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mtrl.config.schema import Config
from mtrl.errors import UserError

EPOCHS, STEPS = "trainer.epochs", "trainer.max_steps"


def length_of(overrides: Sequence[str], has_own_groups: bool) -> list[str]:
    """Return the overrides to add so that the length that a command sets is the length of the run.

    Args:
        has_own_groups: whether the user has config groups of their own, whose `trainer.epochs` would have priority over
            the `trainer.max_steps` of the command.

    Raises:
        UserError: the command sets both lengths, one of which would have no effect.
    """
    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    if EPOCHS in given and STEPS in given and given[EPOCHS] != "null":
        raise UserError(
            f"{EPOCHS}={given[EPOCHS]} and {STEPS}={given[STEPS]} both set the length of the run; leave one of them out"
        )
    return [f"{EPOCHS}=null"] if has_own_groups and STEPS in given and EPOCHS not in given else []


def with_steps(config: Config, rows: int, needs_critic: bool) -> Config:
    """Return the configuration with its length in steps. If `trainer.epochs` is set, `max_steps` is the smallest number
    of steps that draws each of `rows` training rows that often. Rows that dynamic sampling or failed groups draw in
    addition are not counted.

    Args:
        needs_critic: whether `algorithm.advantage_method` needs a critic; else its warm-up has no effect.

    Raises:
        UserError: the critic would warm up for the whole run.
    """
    trainer = config.trainer
    if trainer.epochs is None:
        return config
    draws = Fraction(str(trainer.epochs)) * rows  # exact, since a rounding error of 1.1 * 100 would add a step
    steps = max(1, math.ceil(draws / trainer.prompts_per_step))
    critic = config.algorithm.critic
    if needs_critic and critic.warmup_steps >= steps:
        raise UserError(
            f"algorithm.critic.warmup_steps={critic.warmup_steps} leaves no step for the policy of "
            f"{EPOCHS}={trainer.epochs:g}, which is {steps} steps with {rows} training rows; lower the first or raise "
            "the second"
        )
    return replace(config, trainer=replace(trainer, max_steps=steps, epochs=None))
