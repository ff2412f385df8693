"""Checks of `environments`, the mixture of tasks of one run, across its sources and with the other settings."""

from __future__ import annotations

from mtrl.config import keys
from mtrl.config.derived import runs_agent
from mtrl.config.mixture import in_source, source_configs, weights_of
from mtrl.config.schema import Config
from mtrl.errors import UserError


def check_mixture(config: Config) -> None:
    """Check a mixture that has at least one source.

    Raises:
        UserError: a weight is wrong, a source needs an agent program, or another setting works with one task only.
    """
    weights_of(config)
    one_task = {
        "generator.agent names a program, which": runs_agent(config),
        f"environment.opponent={config.environment.opponent}": config.environment.opponent != "scripted",
        f"trainer.epochs={config.trainer.epochs}": config.trainer.epochs is not None,
    }
    for setting, is_set in one_task.items():
        if is_set:
            raise UserError(
                f"{setting} works with one task only, and environments has {', '.join(config.environments)}; take it "
                "out, or set environments={}"
            )
    for name, own in source_configs(config).items():
        with in_source(name):
            _refuse_program(own)
            _check_context(config, own)


def _check_context(config: Config, own: Config) -> None:
    """Check that the contexts of a source are within those of the run, whose memory and folds are for all sources."""
    whole, mine = config.generator.max_context_length, own.generator.max_context_length
    if mine == whole:
        return
    if config.generator.context.fold != "none":
        raise UserError(
            f"generator.max_context_length={keys.typed(mine)} cannot differ from the run's where contexts are folded "
            f"(generator.context.fold={config.generator.context.fold}); take it out"
        )
    if mine is None or (whole is not None and mine > whole):
        raise UserError(
            f"generator.max_context_length={keys.typed(mine)} must be at most that of the run, {whole}; lower it, or "
            "raise generator.max_context_length of the run"
        )


def _refuse_program(config: Config) -> None:
    from mtrl.environments.agent import ProgramTask
    from mtrl.environments.family import get_family

    if get_family(config.environment.name, config.environment.target).environment is ProgramTask:
        raise UserError(
            f"environment.name={config.environment.name} needs an agent program, which runs one task only; train it "
            "in a run of its own"
        )
