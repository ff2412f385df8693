"""Settings of the checks of a run: before it (preflight) and during it (diagnosis)."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl.config.field import number, one_of


@dataclass
class DiagnosisConfig:
    """The rules of `mtrl diagnose`, applied during a run."""

    live: str = one_of("warn", "stop", "none")
    """Reaction of a run to a symptom. warn: the symptom is logged | stop: a collapse, a hacked reward or a wide gap to
    held-out rows also ends the run, after it is saved | none: no diagnosis during the run"""
    window: int = number(25, at_least=5)
    """Number of steps that a decision is based on; the effect of one changed setting takes 25 to 50 steps to show."""


@dataclass
class PreflightConfig:
    """The checklist before a run, `mtrl preflight`, and its cheap checks at the start of a run."""

    at_start: str = one_of("warn", "stop", "none")
    """Reaction of a run to the findings of its cheap checks. warn: findings are logged | stop: a failed check ends the
    run | none: the checks are skipped"""
    rows: int = number(64, at_least=1)
    """Number of rows whose episodes are run, half of them held-out rows."""
    seconds: float = number(20.0, above=0)
    """Time limit of each pass of episodes, in seconds; unfinished episodes are left out and counted."""
    processes: int = number(2, at_least=0)
    """Number of new processes that repeat the episodes; fewer than 2 skips this check."""
    model: bool = True
    """Whether the policy runs episodes as well; false skips all checks that need it."""
    rollouts: int = number(100, at_least=1, why="preflight.model=false skips the checks that need the policy")
    """Number of episodes of the policy."""
    json: str | None = None
    """File of the results; null: preflight.json in the folder of the run. A run does not overwrite the results of the
    whole checklist."""
