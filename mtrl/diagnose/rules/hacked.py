"""Rule 3: the reward rises and success does not: the policy exploits a mistake of the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrl.diagnose.disagreement import RewardAgreement, disagreement
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.gap import find_gap
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.stats import Change, error_of_share
from mtrl.diagnose.views import (
    HELD_OUT,
    REWARD,
    SUCCESS,
    evaluations,
    from_to,
    known,
    level,
    other_schemes,
    over_the_run,
    propose,
    recent,
    rescoring,
    span,
    success,
)  # fmt: skip
from mtrl.utils.text import percent, short

LENIENT, CLAIMS = "rollout/lenient_frac", "rollout/claims/mean"
LEAST = 0.1
"""Minimum share of rollouts that only the reward calls solved, or minimum rise of the reward in units of a success."""
OF_CLAIMS = 0.3
"""Minimum share of the rollouts called solved by the reward that the scorer rejects."""
FOLLOWS = 0.25
"""Share of the rise of the reward. Success has not followed the reward if it rises less than this share."""


@dataclass(frozen=True)
class _Signs:
    reward: Change
    success: Change | None
    lenient: float
    """Lower bound of the share of the last rollouts that only the reward calls solved."""
    of_claims: float
    """That share divided by the share of rollouts that the reward calls solved."""
    grows: bool
    """Whether the share grows, or is above `LEAST` and does not fall."""


@rule("R150", "R135", "R104", "R117", windows=0.6)
def hacked_reward(record: Record) -> Finding | None:
    """The training reward rises and success by the scorer does not: the reward is being exploited."""
    signs = _signs(record)
    if signs is None:
        return None
    exploited = signs.lenient >= LEAST and signs.of_claims >= OF_CLAIMS and signs.grows
    apart = _is_apart(signs, record) and record.steps >= record.window
    held_out = _apart_held_out(record)
    gap = find_gap(record)
    unseen = gap is not None and not gap.scored
    if not (exploited or apart or held_out or unseen):
        return None
    seen = disagreement(record)
    confirmed = exploited or seen.lenient_share >= LEAST or level(record, "val/lenient_frac", steps=3) >= LEAST
    if not (confirmed or apart or unseen or held_out >= 2):
        return None  # partial credit: success often follows at the next evaluation
    if confirmed and seen.fitting_threshold is not None:
        return _misfit(record, signs, seen)
    schemes = other_schemes(record)
    return Finding(
        severity=Severity.ALARM if confirmed else Severity.WARNING,
        title=_title(signs, confirmed, record),
        evidence=known(
            from_to("the training reward", signs.reward),
            from_to("success of the same rollouts, by the scorer,", signs.success)
            if signs.success and record.has(SUCCESS)
            else None,
            f"the reward counts {percent(level(record, CLAIMS, steps=8))} of the last rollouts as solved, and the "
            f"scorer rejects {percent(signs.of_claims)} of them"
            if record.has(CLAIMS)
            else None,
            f"of {seen.looked_at} stored trajectories {seen.lenient} are rewarded as solved and are not solved"
            if seen.lenient
            else None,
            evaluations(record, HELD_OUT, "held-out success"),
            evaluations(record, "val/reward/mean", "held-out reward"),
            *_grown(record),
        ),
        metrics=(REWARD, success(record), LENIENT, HELD_OUT, "val/reward/mean"),
        steps=span(record.series(REWARD)),
        proposals=_proposals(record, schemes),
        advice="Read such trajectories and make the reward reject what the scorer rejects. Rescore the stored "
        "trajectories before training again: none of them may then be rewarded as solved. With diagnosis.live=stop "
        "such a run ends by itself."
        if confirmed
        else "The reward counts something that does not lead to success: find the component that grew, and give it a "
        "smaller weight, or reward it only once.",
        expect="with the repaired reward, training reward and held-out success rise together within 25 to 50 steps; "
        f"{LENIENT} stays near 0",
        look=(f"mtrl view {record.path or 'RUN'}", f"mtrl rescore {record.path or 'RUN'}",
              *rescoring(record, schemes)),
        witnesses=seen.witnesses,
    )  # fmt: skip


def _signs(record: Record) -> _Signs | None:
    steps = max(5, record.window // 3)
    reward = over_the_run(record, REWARD, steps)
    if reward is None:
        return None
    lenient, claims = recent(record, LENIENT, steps), level(record, CLAIMS, steps=steps)
    change = over_the_run(record, LENIENT, steps)
    sure = 0.0 if lenient is None else max(0.0, lenient.value - 2 * lenient.error)
    grows = change is not None and (change.at_least(2.0) > 0 or (sure > LEAST and change.at_least(2.0) == 0))
    return _Signs(reward, over_the_run(record, success(record), steps), sure, sure / claims if claims else 0.0, grows)


def _is_apart(signs: _Signs, record: Record) -> bool:
    """Whether the reward has certainly risen and success certainly has not risen with it. Rewards are in units of a
    success."""
    if signs.success is None or signs.reward.at_least() < 1.5 * LEAST * record.unit:
        return False
    followed = signs.success.difference + 2 * signs.success.error
    return followed < FOLLOWS * signs.reward.difference / record.unit


def _apart_held_out(record: Record) -> int:
    """Return the number of consecutive evaluations, up to the last one, whose reward has risen since step 0 and whose
    success has not."""
    reward, scored = record.series("val/reward/mean").values / record.unit, record.series(HELD_OUT).values
    episodes = max(1.0, level(record, "val/episodes") or float(record.setting("evaluation.rows")))
    count = 0
    if len(reward) == len(scored):
        for earned, succeeded in zip(reward[:0:-1], scored[:0:-1], strict=True):
            rise, followed = earned - reward[0], succeeded - scored[0]
            sure = rise - 3 * math.hypot(error_of_share(earned, episodes), error_of_share(reward[0], episodes))
            if sure <= LEAST or followed + 2 * error_of_share(succeeded, episodes) >= FOLLOWS * rise:
                break
            count += 1
    return count


def _title(signs: _Signs, confirmed: bool, record: Record) -> str:
    reward = f"The reward rose from {short(signs.reward.before)} to {short(signs.reward.after)}"
    if signs.reward.at_least() <= 0:
        reward = f"The reward is {short(signs.reward.after)}"
    if signs.success is not None:
        name = "success by the scorer" if record.has(SUCCESS) else "held-out success"
        moved = f"{name} went from {percent(signs.success.before)} to {percent(signs.success.after)}"
        return f"{reward} and {moved}: " + (
            "the reward is being hacked" if confirmed else "the reward does not measure success"
        )
    if signs.lenient > 0:
        return f"{reward}, and the scorer rejects {percent(signs.lenient)} of the rollouts that it counts as solved"
    return f"{reward}, and held-out success is {percent(float(record.series(HELD_OUT).values[-1]))}"


def _grown(record: Record) -> list[str]:
    """Describe the reward components that grew."""
    sentences = []
    for key in record.metrics("rollout/components/"):
        change = over_the_run(record, key, max(5, record.window // 3))
        if change is not None and change.at_least() >= LEAST * record.unit / 2:
            sentences.append(from_to(f"component {key.removeprefix('rollout/components/')}", change))
    return sentences


def _proposals(record: Record, schemes: list[str]) -> tuple[Proposal, ...]:
    weights = {name: weight for name, weight in (record.setting("reward.components") or {}).items() if weight}
    grown = [
        propose(f"no reward for {name}, which grew while success did not", **{f"reward__components__{name}": 0.0})
        for name in weights
        if name != "environment"
        and len(weights) > 1  # otherwise no reward would be left
        and (change := over_the_run(record, f"rollout/components/{name}", max(5, record.window // 3)))
        and change.at_least() > 0
    ]
    others = [propose("another reward of this task", reward__scheme=scheme) for scheme in schemes]
    return (*grown, *others)


def _misfit(record: Record, signs: _Signs, seen: RewardAgreement) -> Finding:
    """Return the finding for a wrong claim threshold: successes earn clearly more than lenient trajectories, so the
    threshold is wrong and not the reward."""
    return Finding(
        severity=Severity.WARNING,
        title=f"A reward of {short(record.unit)} counts as a success, and every success by the scorer earns "
        f"at least {short(seen.fitting_threshold or 0.0)}",
        evidence=(
            f"{seen.lenient} of {seen.looked_at} stored trajectories reach {short(record.unit)} without success; "
            f"the highest of their rewards is {short(seen.best_lenient)}",
            from_to("the training reward", signs.reward),
        ),
        metrics=(REWARD, success(record), LENIENT),
        steps=span(record.series(REWARD)),
        proposals=(
            propose(
                "the reward from which an episode is a success", evaluation__claim_threshold=seen.fitting_threshold
            ),
        ),
        expect=f"{LENIENT} is 0 from the first step",
        witnesses=seen.witnesses,
    )
