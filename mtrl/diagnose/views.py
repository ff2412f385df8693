"""Shared helpers of the rules: windows and changes of a metric, tests for flat and solved runs, and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mtrl.config.mixture import is_replaced, setters
from mtrl.diagnose.finding import Proposal
from mtrl.diagnose.record import Record, Series
from mtrl.diagnose.stats import Change, Mean, compare, mean, noise
from mtrl.utils.text import short

REWARD, SUCCESS = "rollout/reward/mean", "rollout/success/mean"
HELD_OUT, SAMPLED = "val/success/mean", "val/success/sampled"
EQUAL, ENTROPY = "analysis/zero_adv_frac", "train/entropy"
AT_CAP, MAX_TOKENS = "rollout/tokens/at_cap_frac", "generator.sampling_params.max_generate_length"
MAX_TURNS, GROUP_SIZE = "generator.max_turns", "algorithm.group_size"
SOLVED = 0.9
"""Share of successes from which little is left to learn, so equal groups are not a symptom."""
FEW_SUCCESSES = 0.3
"""Share of successes below which most of them may be luck."""


def recent(record: Record, key: str, steps: int | None = None) -> Mean | None:
    """Return the mean of the last window; None if there are fewer than three values."""
    values = record.series(key).values
    last = values[-(steps or record.window) :]
    return mean(last, noise(values)) if len(last) >= 3 else None


def level(record: Record, key: str, otherwise: float = 0.0, steps: int | None = None) -> float:
    """Return the value of `recent`, or `otherwise` if it is None."""
    found = recent(record, key, steps)
    return otherwise if found is None else found.value


def over_the_run(record: Record, key: str, steps: int | None = None) -> Change | None:
    """Return the change from the first window to the last. Windows never overlap, so those of short runs are
    smaller."""
    values = record.series(key).values
    width = min(steps or record.window, len(values) // 2)
    return compare(values[:width], values[-width:], noise(values)) if width >= 3 else None


def between_last(record: Record, key: str) -> Change | None:
    """Return the change from the second-to-last window to the last."""
    values = record.series(key).values
    width = min(record.window, len(values) // 2)
    return compare(values[-2 * width : -width], values[-width:], noise(values)) if width >= 3 else None


def is_flat(change: Change | None, tolerance: float) -> bool:
    """Whether the change is certainly within `tolerance`. A noisy measurement does not count as flat."""
    return change is not None and change.at_most() <= tolerance


def is_solved(record: Record) -> bool:
    """Whether the agent nearly always succeeds, in training or held out. The reward decides only if nothing was ever
    scored."""
    held_out = record.series(HELD_OUT).values
    if not record.has(SUCCESS) and not len(held_out):
        return level(record, REWARD) >= SOLVED * record.unit
    return level(record, SUCCESS) >= SOLVED or (len(held_out) > 0 and float(held_out[-1]) >= SOLVED)


def success(record: Record) -> str:
    """Return the key of the scorer's success on training rollouts, else of held-out success."""
    return SUCCESS if record.has(SUCCESS) else HELD_OUT


def are_cut(record: Record) -> bool:
    """Whether most rollouts have a turn that the token cap cut, and the mean turn is long too, so the cut turns are not
    runaway exceptions."""
    cap = max(values_of(record, MAX_TOKENS).values())
    return level(record, AT_CAP) > 0.5 and level(record, "rollout/tokens/response_mean") >= cap / 3


def room_for_responses(record: Record) -> Proposal:
    """Propose twice the tokens per turn."""
    return propose_each("room for the whole response", values_of(record, MAX_TOKENS), lambda cap: 2 * cap)


def lr_share(record: Record) -> float:
    """Return the mean learning rate of the last window as a share of its peak: near 0 at the end of a schedule."""
    rates = record.series("train/lr").values
    if not len(rates) or rates.max() <= 0:
        return 1.0
    return float(rates[-record.window :].mean() / rates.max())


def span(series: Series) -> tuple[int, int]:
    """Return the first and the last step; (0, 0) for an empty series."""
    return (int(series.steps[0]), int(series.steps[-1])) if len(series) else (0, 0)


def from_to(name: str, change: Change) -> str:
    """Return a sentence such as `name went from 0.21 to 0.62 (± 0.02)`."""
    error = f" (± {short(2 * change.error)})" if 0 < change.error < math.inf else ""
    return f"{name} went from {short(change.before)} to {short(change.after)}{error}"


def evaluations(record: Record, key: str, name: str) -> str | None:
    """Return a sentence such as `held-out success was 0.10 at step 0, 0.45 at step 40 and 0.44 at step 80`; None with
    fewer than two values."""
    series = record.series(key)
    if len(series) < 2:
        return None
    shown = sorted({0, len(series) // 2, len(series) - 1})
    points = [f"{short(float(series.values[i]))} at step {int(series.steps[i])}" for i in shown]
    return f"{name} was {', '.join(points[:-1])} and {points[-1]}"


def known(*sentences: str | None) -> tuple[str, ...]:
    """Return the sentences that are not empty or None."""
    return tuple(sentence for sentence in sentences if sentence)


def propose(why: str, **words: object) -> Proposal:
    """Return a proposal with overrides from keywords; `__` stands for the dot of a key."""
    return Proposal(tuple(f"{key.replace('__', '.')}={_typed(value)}" for key, value in words.items()), why)


def values_of(record: Record, path: str) -> dict[str, int]:
    """Return the keys that hold a whole number which episodes read, with their values: the key of the run, unless every
    source of a mixture replaces it, and those of the sources that do."""
    environments = record.setting("environments")
    own = [f"environments.{name}.{path}" for name in setters(environments, path)]
    read = own if is_replaced(environments, path) else [path, *own]
    return {key: int(record.setting(key)) for key in read}


def written(values: Mapping[str, int]) -> str:
    """Return the keys of `values_of` as a list such as `generator.max_turns=5`."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def choice(values: Mapping[str, int]) -> str:
    """Return the different values of `values_of`, such as `3 or 5`."""
    return " or ".join(map(str, sorted(set(values.values()))))


def propose_each(why: str, values: Mapping[str, int], change: Callable[[int], int], **words: object) -> Proposal:
    """Return a proposal that changes each of the keys of `values_of`, with further `words` as for `propose`."""
    changed = tuple(f"{key}={change(value)}" for key, value in values.items())
    return Proposal((*changed, *propose(why, **words).words), why)


def _typed(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def other_schemes(record: Record) -> list[str]:
    """Return the scheme `default` of the task if the run uses another one; else an empty list.

    No other scheme is proposed. `default` rewards only the task, or takes back advance rewards at the end, while other
    schemes may reward behaviour that never solves the task (the check `local_optimum` of `mtrl preflight`).
    """
    if not (record.setting("reward.components") or {}).get("environment"):
        return []
    from mtrl.environments.family import get_family

    try:
        family = get_family(record.setting("environment.name"), record.setting("environment.target"))
        schemes: Sequence[str] = getattr(family.environment, "reward_schemes", ())
    except Exception:  # the task may not be installed here; the diagnosis continues without it
        return []
    return ["default"] if "default" in schemes and record.setting("reward.scheme") != "default" else []


def rescoring(record: Record, schemes: Sequence[str]) -> tuple[str, ...]:
    """Return commands that rescore the stored trajectories with other rewards, without a model."""
    run = record.path or "RUN"
    return tuple(f"mtrl rescore {run} reward.scheme={scheme}" for scheme in schemes)
