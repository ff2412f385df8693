"""Checks of `environment.opponent`, which makes training episodes self-play, with the other settings."""

from __future__ import annotations

from omegaconf import DictConfig

from mtrl.config.derived import runs_agent
from mtrl.config.mixture import unfit
from mtrl.errors import UserError


def check_self_play(cfg: DictConfig) -> None:
    """Check that the run can play the roles that are not scripted.

    Raises:
        UserError: the environment has one role, or a role with an unfit name, or the agent program or the backend
            cannot play several roles.
    """
    from mtrl.environments.family import get_family
    from mtrl.environments.roles import RoleEnvironment

    opponent, backend = cfg.environment.opponent, cfg.generator.backend
    if opponent == "scripted":
        return
    if cfg.environments:  # refused by `check_mixture`
        return
    setting = f"environment.opponent={opponent}"
    family = get_family(cfg.environment.name, cfg.environment.target)
    if not isinstance(family.environment, type) or not issubclass(family.environment, RoleEnvironment):
        raise UserError(
            f"{setting} needs a task with several roles, and {family.name} has one; take environment=tic_tac_toe or "
            "a RoleEnvironment of your own, or set environment.opponent=scripted"
        )
    for role in family.environment.roles:
        if why := unfit(role):
            raise UserError(
                f"{setting} needs other names: {role!r} in {family.environment.__name__}.roles cannot be the name of a "
                f"role, since {why}; choose another name"
            )
    if runs_agent(cfg):
        raise UserError(
            f"{setting} needs the episode loop of mtrl, and generator.agent names a program with a loop of its own; "
            "remove the program, or set environment.opponent=scripted"
        )
    if opponent == "frozen" and backend != "local":
        raise UserError(
            f"{setting} keeps a second copy of weights in the embedded engine, which generator.backend={backend} does "
            "not have; set generator.backend=local, or environment.opponent=policy"
        )
