"""Credit for single turns: whether turns have rewards, and whether groups have comparable turns."""

from __future__ import annotations

from mtrl.algorithms.registry import ESTIMATORS
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import GROUP_SIZE, choice, level, other_schemes, propose, propose_each, values_of
from mtrl.utils.text import percent

EARLY, LONELY = "rollout/reward/early_frac", "analysis/lonely_turns"


def _credit(record: Record) -> str | None:
    """Return the unit of credit of this run, such as "turn" or "trajectory"; None for an unknown estimator."""
    chosen = record.setting("algorithm.credit")
    try:
        return chosen or next(iter(ESTIMATORS.find(record.setting("algorithm.advantage_method")).credits), None)
    except Exception:  # an estimator of the user's own
        return None


def _chosen(record: Record) -> bool:
    """Whether the configuration sets credit per turn explicitly. The default `turn_rloo` does not count, because it
    equals `rloo` if no turn before the last one is rewarded."""
    return _credit(record) == "turn" or record.setting("algorithm.advantage_method") == "mt_grpo"


@rule("R012", "R100", windows=0.6)
def idle_turn_credit(record: Record) -> Finding | None:
    """The run uses credit per turn, and only outcomes are rewarded."""
    if not _chosen(record) or not record.has(EARLY) or level(record, EARLY) >= 0.01:
        return None
    if level(record, "rollout/turns/mean", 2.0) < 1.2:
        return None
    method = record.setting("algorithm.advantage_method")
    plain = (
        propose("credit for the whole trajectory", algorithm__credit="trajectory")
        if record.setting("algorithm.credit")
        else propose("credit for the whole trajectory", algorithm__advantage_method="rloo")
    )
    return Finding(
        severity=Severity.NOTE,
        title=f"algorithm.advantage_method={method} credits single turns, and {percent(level(record, EARLY))} of the "
        "trajectories are rewarded before their last turn",
        metrics=(EARLY,),
        proposals=(
            *(propose("a reward for single turns", reward__scheme=scheme) for scheme in other_schemes(record)),
            plain,
        ),
        advice="Reward turns that make progress, or use credit for the trajectory, which has the same effect here.",
        expect=f"{EARLY} above 0 with a reward on turns",
    )


@rule("R012", windows=0.6)
def lonely_turns(record: Record) -> Finding | None:
    """Many turns are reached by only one rollout of a group, so credit per turn has no peers to compare them with."""
    turns = level(record, "rollout/turns/mean") * record.episodes
    share = level(record, LONELY) / turns if turns else 0.0
    if share < 0.1 or _credit(record) != "turn":
        return None
    sizes = values_of(record, GROUP_SIZE)
    return Finding(
        severity=Severity.WARNING,
        title=f"{percent(share)} of the turns have no peer in their group and get no credit",
        evidence=(f"groups of {choice(sizes)}, {level(record, LONELY):.0f} such turns per step",),
        metrics=(LONELY, "rollout/turns/mean"),
        proposals=(
            propose_each("larger groups", sizes, lambda size: 2 * size),
            propose(
                "credit that compares with the whole group",
                algorithm__advantage_method="turn_rloo",
                algorithm__credit="null",
            ),
        ),
        expect=f"{LONELY} falls at once",
    )
