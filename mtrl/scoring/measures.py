"""Metrics of groups of scored trajectories, shared by the evaluations of a run and `mtrl.evaluate`."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TypeVar

from mtrl.config.schema import EvaluationConfig
from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, claimed, succeeded
from mtrl.scoring.pass_at_k import pass_at_k_by_prompt
from mtrl.scoring.statistics import success_rate
from mtrl.types import FinishReason, Group, Row, StopReason, Trajectory, Turn
from mtrl.utils.plain_numbers import check_names, plain
from mtrl.utils.process_guard import CallTimeoutError, in_time
from mtrl.utils.user_code import reason

T = TypeVar("T")
Measure = Callable[[Trajectory, Row], Mapping[str, float]]

MEASURE_SECONDS = 600.0
"""Time limit of the measures of one episode, in seconds."""
FIELD = "field/"
"""Prefix of a family's measures of single answer fields."""
FORMAT = "format"


@dataclass(frozen=True)
class ScoredEpisode:
    """A trajectory and its row."""

    trajectory: Trajectory
    row: Row

    @property
    def id(self) -> str:
        return f"{self.trajectory.group_id}/{self.trajectory.index}"

    @property
    def row_id(self) -> str:
        return str(self.row.get("id", self.trajectory.task_id))


@dataclass(frozen=True)
class Spread:
    """Summary statistics of some values."""

    mean: float
    median: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the statistics of the values; None if there are none. Percentiles are values that occur (nearest
        rank)."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(fmean(ordered), nearest_rank(ordered, 0.5), nearest_rank(ordered, 0.95), float(ordered[-1]))


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ascending values such that at least this share of the values does not exceed it."""
    return float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)])


def episodes_of(groups: Iterable[Group]) -> list[ScoredEpisode]:
    return [ScoredEpisode(trajectory, group.row) for group in groups for trajectory in group.trajectories]


def successes(groups: Iterable[Group], threshold: float) -> list[list[float]]:
    """Return 1.0 or 0.0 for every trajectory of every group: whether its score reaches the threshold."""
    return [[float(succeeded(t, threshold)) for t in group.trajectories] for group in groups]


def claims(groups: Iterable[Group], threshold: float) -> list[list[float]]:
    """Return 1.0 or 0.0 for every trajectory of every group: whether its reward reaches the threshold."""
    return [[float(claimed(t, threshold)) for t in group.trajectories] for group in groups]


LENGTH_LIMITS = frozenset({StopReason.TURN_TOKEN_LIMIT, StopReason.CONTEXT_LIMIT})
"""Stop reasons of episodes that a length limit ended."""


def at_cap(turn: Turn) -> bool:
    """Whether the turn stopped at the limit of tokens per turn. A turn without a token did not, because its context was
    full."""
    return turn.finish == FinishReason.LENGTH and sampled_tokens(turn) != 0


def is_cut(trajectory: Trajectory) -> bool:
    """Whether any turn of the trajectory stopped at the limit of tokens per turn."""
    return any(map(at_cap, trajectory.turns))


def is_completed(trajectory: Trajectory) -> bool:
    """Whether the trajectory holds an answer that the task can read, right or wrong (`Family.answered`). If the task
    cannot tell: whether the environment ended the episode after a turn that no limit cut."""
    if trajectory.answered is not None:
        return trajectory.answered
    return trajectory.stop_reason == StopReason.DONE and not (trajectory.turns and at_cap(trajectory.turns[-1]))


def is_out_of_turns(trajectory: Trajectory) -> bool:
    """Whether the episode used up its turns without an answer."""
    return trajectory.stop_reason == StopReason.MAX_TURNS and not is_completed(trajectory)


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether a length limit cut the episode or any of its turns."""
    return trajectory.stop_reason in LENGTH_LIMITS or is_cut(trajectory)


def sampled_tokens(turn: Turn) -> int | None:
    """Return the number of sampled tokens of a turn. An endpoint gives no ids, so the count of its provider is used;
    None if the provider did not count either."""
    if turn.action_ids or "completion_tokens" not in turn.metrics:
        return len(turn.action_ids)
    return int(turn.metrics["completion_tokens"]) or None


def episode_tokens(trajectory: Trajectory) -> int | None:
    """Return the number of sampled tokens of an episode; None if the number of any turn is not known."""
    counts = [sampled_tokens(turn) for turn in trajectory.turns]
    return None if None in counts else sum(count for count in counts if count)


def known(values: Iterable[T | None]) -> list[T]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def mean_components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the sum of each reward component over all turns, as the mean over trajectories."""
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        for name, value in turn.components.items():
            sums[name].append(value)
    return {name: math.fsum(values) / len(trajectories) for name, values in sorted(sums.items())}


def measured(episodes: Iterable[ScoredEpisode], family: Family) -> list[dict[str, float]]:
    """Return the family's own measures of every episode that has a turn; empty if the family has no measures.

    Raises:
        UserError: `measure` fails or hangs, or a measure is not in [0, 1].
    """
    if family.measure is None:
        return []
    return [_measures(family.measure, episode, family) for episode in episodes if episode.trajectory.turns]


def _measures(measure: Measure, episode: ScoredEpisode, family: Family) -> dict[str, float]:
    who = f"`measure` of {family.name}, on row {episode.row_id},"
    try:
        found = in_time(partial(_plain, measure, episode), MEASURE_SECONDS)
    except CallTimeoutError:
        raise UserError(f"{who} took longer than {MEASURE_SECONDS:g} s; fix it") from None
    except UserError:
        raise
    except BaseException as error:  # includes SystemExit, which would end the run with its own status
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{who} failed: {reason(error)}; fix it") from error
    for name, value in found.items():
        if not 0 <= value <= 1:
            raise UserError(f"the measure {name} of environment.name={family.name} is {value}; it must be in [0, 1]")
    return found


def _plain(measure: Measure, episode: ScoredEpisode) -> dict[str, float]:
    values = measure(episode.trajectory.without_summaries(), copy.deepcopy(episode.row))
    check_names(values, "it returned measures")
    return {name: plain(value) for name, value in values.items()}


def by_name(values: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each name, over all mappings that have the name."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for each in values:
        for name, value in each.items():
            found[name].append(float(value))
    return dict(found)


def field_accuracies(values: Iterable[Mapping[str, float]]) -> list[float]:
    """Return the share of right fields of every episode that has fields."""
    fields = ([v for name, v in each.items() if name.startswith(FIELD)] for each in values)
    return [fmean(right) for right in fields if right]


# -- a run's evaluations -----------------------------------------------------------------------------------------------


def val_metrics(groups: Mapping[str, list[Group]], config: EvaluationConfig, family: Family) -> dict[str, float]:
    """Return the row of metrics of one evaluation: `val/…`.

    All metrics are of the greedy episodes, except `val/success/sampled`, `val/reward/sampled` and pass@k, which are of
    the sampled ones (pass@1 is of the greedy ones if there are no sampled ones). `val/success/pass_k_K` counts samples
    whose score reaches `evaluation.success_threshold`, and `val/reward/pass_k_K` samples whose reward reaches
    `evaluation.claim_threshold`. Failed episodes count with their score, which is 0 if there is no turn.

    Args:
        groups: Scored and rewarded groups by kind: `greedy`, and optionally `sampled`.

    Raises:
        UserError: A prompt has fewer samples than a value of `evaluation.pass_k_values`.
    """
    greedy, sampled = groups["greedy"], groups.get("sampled", [])
    metrics = _outcomes(greedy, config) | _course(greedy) | _family_metrics(greedy, family)
    thresholds, repeated = Thresholds.of(config), sampled or greedy
    solved, claimed = successes(repeated, thresholds.success), claims(repeated, thresholds.claim)
    if sampled:
        metrics["val/success/sampled"] = success_rate(solved, config.confidence).value
        metrics["val/reward/sampled"] = fmean(t.reward for group in sampled for t in group.trajectories)
    for k in config.pass_k_values if sampled else [1]:
        metrics[f"val/success/pass_k_{k}"] = fmean(pass_at_k_by_prompt(solved, k))
        metrics[f"val/reward/pass_k_{k}"] = fmean(pass_at_k_by_prompt(claimed, k))
    return metrics


def _outcomes(groups: Sequence[Group], config: EvaluationConfig) -> dict[str, float]:
    """Return the outcomes of the episodes by scorer and by reward."""
    trajectories = [t for group in groups for t in group.trajectories]
    rate = success_rate(successes(groups, config.success_threshold), config.confidence)
    return {
        "val/success/mean": rate.value,
        "val/success/ci_low": rate.low,
        "val/success/ci_high": rate.high,
        "val/reward/mean": fmean(t.reward for t in trajectories),
        **agreement_metrics("val", trajectories, Thresholds.of(config)),
        "val/episodes": float(len(trajectories)),
    }


def agreement_metrics(prefix: str, trajectories: Sequence[Trajectory], thresholds: Thresholds) -> dict[str, float]:
    """Return shares of trajectories: those that the reward calls solved, and those on which the scorer disagrees."""
    verdicts = Counter(thresholds.verdict(t) for t in trajectories)
    return {
        f"{prefix}/claims/mean": fmean(claimed(t, thresholds.claim) for t in trajectories),
        f"{prefix}/lenient_frac": verdicts[TrajectoryAgreement.LENIENT] / len(trajectories),
        f"{prefix}/strict_frac": verdicts[TrajectoryAgreement.STRICT] / len(trajectories),
    }


def _course(groups: Sequence[Group]) -> dict[str, float]:
    """Return turns, limits, completion, stop reasons and reward components of the episodes."""
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    stops = Counter(t.stop_reason for t in trajectories)
    return {
        "val/turns/mean": fmean(len(t.environment_turns) for t in trajectories),
        "val/turns/cut_frac": fmean(map(at_cap, turns)) if turns else 0.0,
        "val/tokens/at_cap_frac": fmean(map(is_cut, trajectories)),
        "val/completion/mean": fmean(map(is_completed, trajectories)),
        **{f"val/stop/{reason}": stops[reason] / len(trajectories) for reason in StopReason},
        **{f"val/components/{name}": value for name, value in mean_components(trajectories).items()},
    }


def _family_metrics(groups: Sequence[Group], family: Family) -> dict[str, float]:
    """Return `val/format`, `val/fields/<name>`, `val/field_accuracy` (the mean share of right fields per episode), and
    `val/measures/<name>`."""
    values = measured(episodes_of(groups), family)
    metrics = {_val_key(name): fmean(found) for name, found in sorted(by_name(values).items())}
    accuracies = field_accuracies(values)
    return metrics | ({"val/field_accuracy": fmean(accuracies)} if accuracies else {})


def _val_key(name: str) -> str:
    if name.startswith(FIELD):
        return f"val/fields/{name.removeprefix(FIELD)}"
    return "val/format" if name == FORMAT else f"val/measures/{name}"
