"""Completion compared with correctness. They are two metrics, and the one that lags determines the change (R134)."""

from __future__ import annotations

import math

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.rules.hacked import FOLLOWS
from mtrl.diagnose.views import (
    MAX_TURNS,
    REWARD,
    evaluations,
    from_to,
    known,
    level,
    other_schemes,
    over_the_run,
    propose,
    propose_each,
    rescoring,
    success,
    values_of,
    written,
)
from mtrl.utils.text import percent

COMPLETION, PASS_1 = "val/completion/mean", "val/success/pass_k_1"


@rule("R134", windows=1.0)
def unfinished_success(record: Record) -> Finding | None:
    """pass@1 is high and completion low: episodes that finish succeed, and many do not finish."""
    passed, finished = record.series(PASS_1), record.series(COMPLETION)
    if not len(passed) or len(finished) < 2 or passed.values[-1] < 0.5 or finished.values[-1] > 0.85:
        return None
    limits = values_of(record, MAX_TURNS)
    cut = level(record, "rollout/stop/max_turns")
    if cut < 0.1:
        return None  # episodes end for another reason
    still = finished.values[-1] - finished.values[-2] < 0.05 and finished.values[-1] < 0.7
    return Finding(
        severity=Severity.WARNING if still else Severity.NOTE,
        title=f"pass@1 is {percent(float(passed.values[-1]))} and only {percent(float(finished.values[-1]))} of the "
        "held-out episodes finish",
        evidence=known(
            evaluations(record, COMPLETION, "completion"),
            f"{percent(cut)} of the training rollouts end at {written(limits)}",
        ),
        metrics=(COMPLETION, PASS_1, "rollout/stop/max_turns"),
        proposals=(propose_each("1.5 times the turns", limits, lambda limit: math.ceil(1.5 * limit)),),
        expect="completion rises at once, and pass@1 with it",
    )


@rule("R134", "R139", windows=2.0)
def finished_failure(record: Record) -> Finding | None:
    """Completion is high and pass@1 low: the agent finishes, and the reward does not depend on the right answer."""
    passed, finished = record.series(PASS_1), record.series(COMPLETION)
    if len(passed) < 3 or not len(finished) or finished.values[-1] < 0.9 or passed.values.max() > 0.3:
        return None
    if passed.values[-1] - passed.values[-3] > 0.03 or passed.values[-1] - passed.values[0] > 0.1:
        return None  # pass@1 still improves
    schemes = other_schemes(record)
    return Finding(
        severity=Severity.WARNING,
        title=f"{percent(float(finished.values[-1]))} of the held-out episodes finish, and pass@1 stays at "
        f"{percent(float(passed.values[-1]))}",
        evidence=known(evaluations(record, PASS_1, "pass@1"), evaluations(record, COMPLETION, "completion")),
        metrics=(PASS_1, COMPLETION, REWARD),
        proposals=tuple(propose("another reward of this task", reward__scheme=scheme) for scheme in schemes),
        advice="Redesign the reward: reward right answers, field by field or step by step, and reward finishing less.",
        expect="pass@1 moves within 25 to 50 steps",
        look=rescoring(record, schemes),
    )


@rule("R139", "R135", windows=1.0)
def reward_without_completion(record: Record) -> Finding | None:
    """The reward rises while fewer episodes finish, and success does not rise with it."""
    reward, finished = over_the_run(record, REWARD), over_the_run(record, "rollout/completion/mean")
    succeeded = over_the_run(record, success(record))
    if reward is None or finished is None or succeeded is None:
        return None
    follows = succeeded.difference + 2 * succeeded.error >= FOLLOWS * reward.difference / record.unit
    if reward.at_least() < 0.1 * record.unit or finished.at_least() > -0.1 or finished.after > 0.8 or follows:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"The reward rises while completion falls to {percent(finished.after)}",
        evidence=(from_to("the reward", reward), from_to("completion", finished), from_to("success", succeeded)),
        metrics=("rollout/completion/mean", REWARD, success(record)),
        proposals=tuple(propose("another reward of this task", reward__scheme=s) for s in other_schemes(record)),
        advice="The agent earns rewards without finishing: reward tool calls and turns less, and the answer more.",
        expect="completion and reward rise together",
    )
