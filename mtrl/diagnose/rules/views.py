"""What several rules look at: windows of a metric, changes over the run, what counts as flat or solved; and words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtrl.diagnose.finding import Proposal
from mtrl.diagnose.record import Record, Series
from mtrl.diagnose.stats import Change, Mean, compare, mean, noise
from mtrl.tracking.text import short

REWARD, SUCCESS = "rollout/reward/mean", "rollout/success/mean"
HELD_OUT, SAMPLED = "val/success/mean", "val/success/sampled"
EQUAL = "analysis/zero_adv_frac"
AT_CAP, MAX_TOKENS = "rollout/tokens/at_cap_frac", "generator.sampling_params.max_generate_length"
SOLVED = 0.9
"""From this share of successes there is little left to learn, and groups that agree are no symptom."""


def recent(record: Record, key: str, steps: int | None = None) -> Mean | None:
    """The mean of the last window; None where there are fewer than three values."""
    values = record.series(key).values
    last = values[-(steps or record.window) :]
    return mean(last, noise(values)) if len(last) >= 3 else None


def level(record: Record, key: str, otherwise: float = 0.0, steps: int | None = None) -> float:
    """The value of `recent`, or `otherwise` where it is not known."""
    found = recent(record, key, steps)
    return otherwise if found is None else found.value


def over_the_run(record: Record, key: str, steps: int | None = None) -> Change | None:
    """From the first window to the last; they never overlap, so that those of short runs are smaller."""
    values = record.series(key).values
    width = min(steps or record.window, len(values) // 2)
    return compare(values[:width], values[-width:], noise(values)) if width >= 3 else None


def between_last(record: Record, key: str, steps: int | None = None) -> Change | None:
    """From the window before the last one to the last."""
    values = record.series(key).values
    width = min(steps or record.window, len(values) // 2)
    return compare(values[-2 * width : -width], values[-width:], noise(values)) if width >= 3 else None


def is_flat(change: Change | None, tolerance: float) -> bool:
    """Equal up to `tolerance`, and measured well enough to say so: noise alone is no flat curve."""
    return change is not None and change.at_most() <= tolerance


def is_solved(record: Record) -> bool:
    """The agent succeeds nearly always, in training or held out; by the reward only where nothing was ever scored."""
    held_out = record.series(HELD_OUT).values
    if not record.has(SUCCESS) and not len(held_out):
        return level(record, REWARD) >= SOLVED * record.unit
    return level(record, SUCCESS) >= SOLVED or (len(held_out) > 0 and float(held_out[-1]) >= SOLVED)


def success(record: Record) -> str:
    """The scorer's metric of the training rollouts, else of the held-out ones."""
    return SUCCESS if record.has(SUCCESS) else HELD_OUT


def are_cut(record: Record) -> bool:
    """Most rollouts have a turn that the token cap cut, and turns are long in the mean: none of them runs away."""
    return (
        level(record, AT_CAP) > 0.5 and level(record, "rollout/tokens/response_mean") >= record.setting(MAX_TOKENS) / 3
    )


def room_for_responses(record: Record) -> Proposal:
    """Twice the tokens of a turn."""
    cap = 2 * int(record.setting(MAX_TOKENS))
    return propose("room for the whole response", generator__sampling_params__max_generate_length=cap)


def lr_share(record: Record) -> float:
    """The learning rate of the last window as a share of its peak: near 0 at the end of a schedule."""
    rates = record.series("train/lr").values
    if not len(rates) or rates.max() <= 0:
        return 1.0
    return float(rates[-record.window :].mean() / rates.max())


def span(series: Series) -> tuple[int, int]:
    """First and last step."""
    return (int(series.steps[0]), int(series.steps[-1])) if len(series) else (0, 0)


def from_to(name: str, change: Change, show: object = short) -> str:
    """`name went from 0.21 to 0.62 (± 0.02)`."""
    error = f" (± {short(2 * change.error)})" if 0 < change.error < math.inf else ""
    return f"{name} went from {show(change.before)} to {show(change.after)}{error}"  # type: ignore[operator]


def evaluations(record: Record, key: str, name: str) -> str | None:
    """`held-out success was 0.10 at step 0, 0.45 at step 40 and 0.44 at step 80`; None with fewer than two."""
    series = record.series(key)
    if len(series) < 2:
        return None
    shown = sorted({0, len(series) // 2, len(series) - 1})
    points = [f"{short(float(series.values[i]))} at step {int(series.steps[i])}" for i in shown]
    return f"{name} was {', '.join(points[:-1])} and {points[-1]}"


def known(*sentences: str | None) -> tuple[str, ...]:
    """Those that could be said."""
    return tuple(sentence for sentence in sentences if sentence)


def propose(why: str, **words: object) -> Proposal:
    """Overrides from keywords: `__` is the dot of a key."""
    return Proposal(tuple(f"{key.replace('__', '.')}={_typed(value)}" for key, value in words.items()), why)


def _typed(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_schemes(record: Record) -> list[str]:
    """The scheme `default` of the task, where the run pays by another one; else none.

    No other scheme is proposed: a `default` pays the task alone, or gives back at the end what it paid in advance, and
    the others may pay play that never solves the task (the check `local_optimum` of `python -m mtrl.preflight`).
    """
    if not (record.setting("reward.components") or {}).get("environment"):
        return []
    from mtrl.environments.family import get_family

    try:
        family = get_family(record.setting("environment.name"), record.setting("environment.target"))
        schemes: Sequence[str] = getattr(family.environment, "reward_schemes", ())
    except Exception:  # the task is not installed here; the run is still worth reading
        return []
    return ["default"] if "default" in schemes and record.setting("reward.scheme") != "default" else []


def rescoring(record: Record, schemes: Sequence[str]) -> tuple[str, ...]:
    """Commands that pay the stored trajectories by other rewards, without a model."""
    run = record.path or "RUN"
    return tuple(f"python -m mtrl.rescore {run} reward.scheme={scheme}" for scheme in schemes)
