"""Rule for guessing: episodes end in their first turn, with few successes, in a task of several turns."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.baseline import has_demonstrator
from mtrl.diagnose.views import (
    FEW_SUCCESSES,
    HELD_OUT,
    MAX_TURNS,
    SUCCESS,
    evaluations,
    from_to,
    known,
    level,
    over_the_run,
    propose,
    values_of,
    written,
)
from mtrl.utils.text import percent, short

TURNS = "rollout/turns/mean"
ONE_TURN, SEVERAL_TURNS = 1.2, 3
"""Largest mean number of turns of a policy that guesses, and the smallest `generator.max_turns` of a task of several
turns."""
LEAST_TURNS = "model.warm_start.min_turns"


@rule("R108", "R161", windows=0.4)
def guesses(record: Record) -> Finding | None:
    """Nearly all episodes end in the first turn of several, few succeed, and success does not rise."""
    turns, change = level(record, TURNS, otherwise=SEVERAL_TURNS), over_the_run(record, SUCCESS)
    limits = values_of(record, MAX_TURNS)
    if turns >= ONE_TURN or min(limits.values()) < SEVERAL_TURNS or change is None:
        return None
    share = level(record, SUCCESS)
    if not 0 < share < FEW_SUCCESSES or change.at_least(2.0) > 0:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"The policy answers in the first turn, and {percent(share)} of its rollouts succeed",
        evidence=known(
            f"episodes have {short(turns)} turns in the mean, and {written(limits)}",
            from_to("success", change),
            evaluations(record, HELD_OUT, "held-out success"),
        ),
        metrics=(TURNS, SUCCESS),
        proposals=_proposals(record),
        advice="Read some of the answers: the policy may guess, and a reward of lucky guesses strengthens guessing.",
        expect=f"{TURNS} rises from the first steps, and success with it",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )


def _proposals(record: Record) -> tuple[Proposal, ...]:
    """Propose a warm start whose successes take two turns or more; nothing if that was so, or without a
    demonstrator."""
    if int(record.setting(LEAST_TURNS)) > 1 or not has_demonstrator(record):
        return ()
    enabled = record.setting("model.name") == "tiny" or record.setting("model.warm_start.enabled")
    words = {} if enabled else {"model__warm_start__enabled": True}
    why = "imitate the demonstrator until episodes of several turns succeed"
    return (propose(why, **words, model__warm_start__min_turns=2),)
