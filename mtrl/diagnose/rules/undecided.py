"""Rule for an undecided policy: training began from a policy that chooses nearly at random and seldom succeeds."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.baseline import warmer
from mtrl.diagnose.views import (
    ENTROPY,
    FEW_SUCCESSES,
    HELD_OUT,
    REWARD,
    SUCCESS,
    evaluations,
    from_to,
    known,
    level,
    over_the_run,
)
from mtrl.utils.text import percent, short

FIRST = 5
"""Number of first steps whose entropy and success are read."""
UNDECIDED = 1.0
"""Entropy in nats per token. Twenty-two runs of search (`experiments/smollm2`) that learned began with 0.16 to 0.52,
and the two runs that did not learn, from which this rule was made, with 1.3 and 1.45."""


@rule("R108", "R161", windows=1.0)
def undecided_start(record: Record) -> Finding | None:
    """Training began from a policy that is undecided and seldom succeeds, and success does not rise."""
    first = record.series(ENTROPY).first(FIRST).values
    success, reward = over_the_run(record, SUCCESS), over_the_run(record, REWARD)
    if len(first) < FIRST or first.mean() < UNDECIDED or success is None or reward is None:
        return None
    share = level(record, SUCCESS)
    if not 0 < share < FEW_SUCCESSES or success.at_least(2.0) > 0 or reward.at_least(2.0) > 0:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"The policy began with an entropy of {short(float(first.mean()))} nats per token, and {percent(share)} "
        "of its rollouts succeed",
        evidence=known(
            from_to("success", success),
            from_to("the reward", reward),
            evaluations(record, HELD_OUT, "held-out success"),
        ),
        metrics=(ENTROPY, SUCCESS),
        proposals=warmer(record),
        advice="The few successes are mostly luck, which an update strengthens in one step and weakens in the next: "
        "begin with a policy that succeeds more often.",
        expect=f"{ENTROPY} below {UNDECIDED:g} in the first steps, and {SUCCESS} rises from them on",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )
