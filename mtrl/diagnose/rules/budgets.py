"""Budgets: tokens per turn and turns per episode. A small budget cuts episodes, a large one wastes resources."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.stats import Mean
from mtrl.diagnose.views import (
    AT_CAP,
    MAX_TOKENS,
    MAX_TURNS,
    REWARD,
    choice,
    from_to,
    known,
    level,
    over_the_run,
    propose,
    propose_each,
    recent,
    room_for_responses,
    success,
    values_of,
    written,
)
from mtrl.record.stored import read
from mtrl.scoring.measures import is_overlong
from mtrl.types import StopReason
from mtrl.utils.text import percent, short

CUT = "rollout/turns/cut_frac"
OUT_OF_TURNS, USED_UP = "rollout/out_of_turns/mean", "rollout/stop/max_turns"
"""Metrics with the share of the rollouts that use up their turns: those without an answer, and all."""
TOKENS_AT_MOST, TURNS_AT_MOST = 0.05, 0.1
"""Largest allowed shares of rollouts that reach the token and the turn budget (R145, R146)."""


def _above(share: Mean | None, limit: float) -> bool:
    return share is not None and share.value - 2 * share.error > limit


@rule("R142", "R145", windows=0.6)
def token_cap(record: Record) -> Finding | None:
    """More than 5 % of the rollouts reach the token cap of a turn."""
    key = AT_CAP if record.has(AT_CAP) else CUT
    share = recent(record, key)
    if share is None or not _above(share, TOKENS_AT_MOST):
        return None
    caps, mean = values_of(record, MAX_TOKENS), level(record, "rollout/tokens/response_mean")
    runs_away = mean < min(caps.values()) / 3
    place = "rollouts" if key == AT_CAP else "turns"
    return Finding(
        severity=Severity.WARNING,
        title=f"{percent(share.value)} of the {place} reach the cap of {choice(caps)} tokens",
        evidence=known(
            f"{written(caps)}; a response has {short(mean)} tokens in the mean",
            from_to("the share", change) if (change := over_the_run(record, key)) else None,
            "most responses are far shorter: cut responses may be endless, and a larger limit would not end them"
            if runs_away
            else None,
        ),
        metrics=(key, "rollout/tokens/response_mean", "rollout/tokens/response_max"),
        proposals=(
            room_for_responses(record),
            propose("do not train on cut episodes", algorithm__overlong_filtering=True),
        ),
        advice="Read some of the cut responses first: check whether they repeat themselves." if runs_away else "",
        expect=f"less than 5 % at the cap at once ({key})",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )


@rule("R146", "R140", windows=1.0)
def turn_budget(record: Record) -> Finding | None:
    """More than 10 % of the rollouts use up their turns without a final answer."""
    key = OUT_OF_TURNS if record.has(OUT_OF_TURNS) else USED_UP
    share, change = recent(record, key), over_the_run(record, key)
    if share is None or change is None or not _above(share, TURNS_AT_MOST):
        return None
    learns = over_the_run(record, success(record))
    improves = change.at_least(2.0) < 0 or (learns is not None and learns.at_least(2.0) > 0)
    limits = values_of(record, MAX_TURNS)
    return Finding(
        severity=Severity.NOTE if improves else Severity.WARNING,
        title=f"{percent(share.value)} of the rollouts end at {written(limits)} without a final answer",
        evidence=known(
            from_to("the share", change),
            "the share falls without a change, or success rises: the agent learns to finish" if improves else None,
            f"episodes have {short(level(record, 'rollout/turns/mean'))} turns in the mean",
        ),
        metrics=(key, "rollout/turns/mean", "rollout/completion/mean"),
        proposals=(propose_each("1.5 times the turns", limits, lambda limit: math.ceil(1.5 * limit)),),
        advice="Allow 1.5 times the turns that a person needs: count them with mtrl play.",
        expect=f"{key} below 10 % at once",
    )


@rule("R144", windows=1.0)
def silent_truncation(record: Record) -> Finding | None:
    """Episodes that a length limit cut are trained without the reward of finishing."""
    # A turn may be cut in an episode that ends for another reason, so neither share includes the other.
    ends = [f"rollout/stop/{reason}" for reason in ("turn_token_limit", "context_limit")]
    shares = [found for end in ends if (found := recent(record, end)) is not None]
    ended = Mean(sum(s.value for s in shares), math.hypot(*(s.error for s in shares)), 0) if shares else None
    total = max((s for s in (ended, recent(record, AT_CAP)) if s is not None), key=lambda s: s.value, default=None)
    if not _above(total, TOKENS_AT_MOST) or record.setting("algorithm.overlong_filtering"):
        return None
    assert total is not None
    return Finding(
        severity=Severity.WARNING,
        title=f"{percent(total.value)} of the episodes are cut by a length limit and trained as if they were complete",
        evidence=known(*(f"{end} is {percent(level(record, end))}" for end in (*ends, AT_CAP)), _cut_and_whole(record)),
        metrics=(*ends, AT_CAP, REWARD),
        proposals=(
            propose("do not train on cut episodes", algorithm__overlong_filtering=True),
            room_for_responses(record),
        ),
        expect="analysis/untrained_frac shows the share that is left out; the share of cut episodes stops growing",
    )


def _cut_and_whole(record: Record) -> str | None:
    """Compare the mean rewards of cut and whole episodes in the newest file of trajectories."""
    files = record.files("train")[:1]
    return record.once(("rewards of cut episodes", files[0]), lambda: _rewards_of_cut(files[0])) if files else None


def _rewards_of_cut(file: Path) -> str | None:
    stored = [line.trajectory for line in read(file) if line.trajectory is not None]
    cut = [t.reward for t in stored if is_overlong(t)]
    whole = [t.reward for t in stored if t.stop_reason == StopReason.DONE and not is_overlong(t)]
    if not cut or not whole:
        return None
    earned = f"{len(cut)} cut episodes earn {short(fmean(cut))}, {len(whole)} whole ones {short(fmean(whole))}"
    return f"in {file.name} {earned}"


@rule("R140", "R147", "R161", windows=1.0)
def oversized_turns(record: Record) -> Finding | None:
    """No episode comes near the turn budget."""
    used, limits = recent(record, "rollout/turns/p95"), values_of(record, MAX_TURNS)
    least = min(limits.values())
    if used is None or least < 6 or 2.5 * used.value > least or level(record, USED_UP) > 0.01:
        return None
    fitting = max(2, math.ceil(1.5 * used.value))
    return Finding(
        severity=Severity.NOTE,
        title=f"95% of the episodes need at most {short(used.value)} of {choice(limits)} turns",
        evidence=(f"no more than {percent(level(record, USED_UP))} of them reach {written(limits)}",),
        metrics=("rollout/turns/p95", "rollout/turns/mean", USED_UP),
        proposals=(propose_each("1.5 times what is needed", limits, lambda limit: fitting),),
        expect="the same success; an episode that gets lost ends sooner",
    )


@rule("R140", "R141", "R147", windows=1.0)
def oversized_tokens(record: Record) -> Finding | None:
    """No turn comes near the token cap."""
    caps = values_of(record, MAX_TOKENS)
    cap = min(caps.values())
    longest = record.series("rollout/tokens/response_max").last(record.window).values
    if not len(longest) or cap < 256 or 4 * longest.max() > cap:
        return None
    fitting = 2 ** math.ceil(math.log2(2 * max(1.0, float(longest.max()))))
    return Finding(
        severity=Severity.NOTE,
        title=f"The longest response of {len(longest)} steps has {int(longest.max())} tokens, and the cap is "
        f"{choice(caps)}",
        metrics=("rollout/tokens/response_max",),
        proposals=(propose_each("twice what is needed", caps, lambda cap: fitting),),
        expect="the same success with less memory set aside",
    )
