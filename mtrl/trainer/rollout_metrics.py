"""Metrics `rollout/…` of the episodes of a training step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from mtrl.config.mixture import source_of
from mtrl.rollout.failures import episode_count
from mtrl.rollout.rollouts import RolloutReport
from mtrl.scoring.agreement import Thresholds
from mtrl.scoring.measures import (
    agreement_metrics,
    at_cap,
    is_completed,
    is_cut,
    is_out_of_turns,
    mean_components,
    nearest_rank,
)
from mtrl.scoring.sources import named, of_source
from mtrl.types import BREAKS, Group, StopReason, Trajectory, Turn

COUNTED = "gateway/"
"""Prefix of the metrics that `mtrl.gateway.session.Session` counts."""


def rollout_metrics(report: RolloutReport, thresholds: Thresholds | None = None) -> dict[str, float]:
    """Return the metrics of the episodes of a step.

    `rollout/success/mean`         mean score
    `rollout/claims/mean`          share of trajectories that are solved according to the reward
    `rollout/lenient_frac`         share that is solved by the reward and not by the scorer; `strict_frac` the reverse
    `rollout/completion/mean`      share of episodes with an answer that the task can read, right or wrong
    `rollout/out_of_turns/mean`    share of episodes that used up all turns without such an answer
    `rollout/turns/mean`           number of turns of an episode that the environment received; also `p95` and `max`
    `rollout/turns/cut_frac`       share of turns that the token limit of a turn cut
    `rollout/tokens/at_cap_frac`   share of episodes with such a turn
    `rollout/tokens/response_*`    number of sampled tokens of a turn; `trajectory_mean`: of an episode
    `rollout/context/*`            number of tokens of a whole conversation at its end
    `rollout/components/NAME`      mean over episodes of the sum over turns
    `rollout/metrics/NAME`         mean over the turns that reported it
    `rollout/episode/NAME`         mean over the episodes for which an agent or judge reported it; `attempts` over all
    `rollout/gateway/NAME`         mean over all episodes of the gateway's count per episode
    `rollout/stop/REASON`          share of episodes that ended for this reason
    `rollout/breaks/REASON`        number of turns that started a new sample for this reason

    In self-play against frozen weights a step may have no turn of a trained role; `rollout/turns/cut_frac` and
    `rollout/tokens/response_*` are absent then.
    """
    trajectories = [t for group in report.groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    lengths = [len(t.environment_turns) for t in trajectories]
    context = [t.context_tokens for t in trajectories]
    stops = Counter(t.stop_reason for t in trajectories)
    breaks = Counter(turn.break_reason for turn in turns if turn.break_reason is not None)
    return {
        "rollout/success/mean": fmean(t.score or 0.0 for t in trajectories),
        **agreement_metrics("rollout", trajectories, thresholds or Thresholds()),
        "rollout/turns/mean": fmean(lengths),
        "rollout/turns/p95": nearest_rank(sorted(lengths), 0.95),
        "rollout/turns/max": float(max(lengths)),
        **_response_metrics(turns),
        "rollout/tokens/trajectory_mean": fmean(t.action_tokens for t in trajectories),
        "rollout/tokens/at_cap_frac": fmean(is_cut(t) for t in trajectories),
        "rollout/context/mean": fmean(context),
        "rollout/context/max": float(max(context)),
        "rollout/completion/mean": fmean(map(is_completed, trajectories)),
        "rollout/out_of_turns/mean": fmean(map(is_out_of_turns, trajectories)),
        "rollout/reward/std": pstdev(t.reward for t in trajectories),
        "analysis/group_reward_std": group_reward_std(report.groups),
        "rollout/failed_episodes": float(episode_count(report.failures)),
        "rollout/breaks": float(breaks.total()),
        **{f"rollout/breaks/{reason}": float(breaks[reason]) for reason in BREAKS},
        **{f"rollout/stop/{reason}": stops[reason] / len(trajectories) for reason in StopReason},
        **{f"rollout/components/{name}": mean for name, mean in mean_components(trajectories).items()},
        **reported_metrics(trajectories),
    }


def _response_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the share of turns that their token limit cut, and the numbers of tokens of turns; empty without turns."""
    if not turns:
        return {}
    responses = sorted(len(turn.action_ids) for turn in turns)
    return {
        "rollout/turns/cut_frac": fmean(map(at_cap, turns)),
        "rollout/tokens/response_mean": fmean(responses),
        "rollout/tokens/response_p95": nearest_rank(responses, 0.95),
        "rollout/tokens/response_max": float(responses[-1]),
    }


def reported_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `rollout/metrics/…` of turns, `rollout/episode/…` and `rollout/gateway/…` of episodes; see
    `rollout_metrics`."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for t in trajectories for turn in t.turns for item in turn.metrics.items()):
        values[f"rollout/metrics/{name}"].append(value)
    counts: defaultdict[str, float] = defaultdict(float)
    for name, value in (item for t in trajectories for item in t.metrics.items()):
        if name.startswith(COUNTED):
            counts[f"rollout/{name}"] += value  # a session has no entry for a count of 0
        else:
            values[f"rollout/episode/{name}"].append(value)
    means = {key: fmean(found) for key, found in sorted(values.items())}
    return means | {key: total / len(trajectories) for key, total in sorted(counts.items())}


def source_metrics(report: RolloutReport, sources: Sequence[str]) -> dict[str, float]:
    """Return the metrics of each source of a mixture in a step; those of `part_metrics` are absent if it has no groups.

    `rollout/NAME/groups`            number of groups
    `rollout/NAME/failed_episodes`   number of episodes that failed in every attempt
    """
    found: dict[str, float] = {}
    for name in sources:
        groups = of_source(report.groups, name)
        failures = episode_count(t for t in report.failures if source_of(t.task_id) == name)
        metrics = {"rollout/groups": float(len(groups)), "rollout/failed_episodes": float(failures)}
        found |= named(metrics, name) | part_metrics([t for group in groups for t in group.trajectories], name)
    return found


def role_metrics(report: RolloutReport) -> dict[str, float]:
    """Return the metrics of `part_metrics` for each trained role of self-play; empty without self-play."""
    own: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in (t for group in report.groups for t in group.trajectories if t.role is not None):
        own[str(trajectory.role)].append(trajectory)
    return {key: value for role in sorted(own) for key, value in part_metrics(own[role], role).items()}


def part_metrics(trajectories: Sequence[Trajectory], name: str) -> dict[str, float]:
    """Return the metrics of the trajectories of one source or role in a step; empty without trajectories.

    `rollout/NAME/success/mean`             mean score
    `rollout/NAME/reward/mean`              mean reward of a trajectory
    `rollout/NAME/completion/mean`          share of trajectories with an answer that the task can read
    `rollout/NAME/turns/mean`               number of turns of a trajectory
    `rollout/NAME/tokens/trajectory_mean`   number of sampled tokens of a trajectory
    `rollout/NAME/components/COMPONENT`     mean over trajectories of the sum over turns
    """
    if not trajectories:
        return {}
    metrics = {
        "rollout/success/mean": fmean(t.score or 0.0 for t in trajectories),
        "rollout/reward/mean": fmean(t.reward for t in trajectories),
        "rollout/completion/mean": fmean(map(is_completed, trajectories)),
        "rollout/turns/mean": fmean(len(t.environment_turns) for t in trajectories),
        "rollout/tokens/trajectory_mean": fmean(t.action_tokens for t in trajectories),
        **{f"rollout/components/{part}": mean for part, mean in mean_components(trajectories).items()},
    }
    return named(metrics, name)


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return `analysis/staleness/{mean,p95,max}`, the number of training steps by which policy `version` is newer than
    the version that sampled each token; empty without tokens."""
    ages = Counter[int]()
    for group in groups:
        for turn in (turn for t in group.trajectories for turn in t.turns):
            for sampled_by, tokens in turn.version_spans:
                ages[version - sampled_by] += tokens
    total = sum(ages.values())
    if not total:
        return {}
    seen, p95 = 0, 0
    for age in sorted(ages):
        seen, p95 = seen + ages[age], age
        if seen >= 0.95 * total:
            break
    mean = sum(age * tokens for age, tokens in ages.items()) / total
    values = {"mean": mean, "p95": p95, "max": max(ages)}
    return {f"analysis/staleness/{name}": float(value) for name, value in values.items()}


def group_reward_std(groups: Sequence[Group]) -> float:
    """Return the mean over groups, each role of self-play by itself, of the standard deviation of their trajectories'
    rewards. Group estimators give no advantage where it is 0."""
    parts = (part for group in groups for part in group.by_role())
    return fmean(pstdev(t.reward for t in part.trajectories) for part in parts)
