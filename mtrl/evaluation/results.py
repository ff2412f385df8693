"""Results of one model's episodes of one kind, greedy or sampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from mtrl.config.schema import EvaluationConfig
from mtrl.environments.family import Family
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement, claimed, succeeded
from mtrl.scoring.measures import (
    FIELD,
    FORMAT,
    ScoredEpisode,
    Spread,
    at_cap,
    claims,
    episode_tokens,
    episodes_of,
    field_accuracies,
    is_completed,
    is_cut,
    is_out_of_turns,
    known,
    mean_components,
    measured,
    sampled_tokens,
    successes,
)
from mtrl.scoring.pass_at_k import pass_at_k_by_prompt
from mtrl.scoring.statistics import Rate, mean_rate, ranking, success_rate
from mtrl.scoring.tool_use import ToolUse, tool_use
from mtrl.types import FAILED, Group, StopReason, Trajectory


@dataclass(frozen=True)
class PassAtK:
    """pass@k over the rows with at least k samples."""

    k: int
    rate: Rate
    rows: int


@dataclass(frozen=True)
class Agreement:
    """Agreement of reward and scorer on the same episodes."""

    claims: float
    """Share of episodes that the reward calls solved."""
    lenient: int
    """Number of episodes that the reward calls solved and the scorer does not."""
    strict: int
    """Number of episodes that the scorer calls solved and the reward does not."""
    agree: Rate
    """Share of episodes on which reward and scorer agree."""
    ranking: float | None
    """Probability that a solved episode has a higher reward than an unsolved one (ties count half); None if all
    episodes are solved or none is."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of the episodes. A value is None if it is not known, as for an endpoint that counts no tokens."""

    turns: Spread | None
    response_tokens: Spread | None
    """Number of sampled tokens of one turn."""
    episode_tokens: Spread | None
    """Number of sampled tokens of a whole episode."""


@dataclass(frozen=True)
class Budgets:
    """Shares of episodes (of turns, for `cut_turns`) that reached a limit."""

    out_of_turns: float
    """Share of episodes that max_turns ended without a final answer."""
    at_token_cap: float
    """Share of episodes with any turn cut at the limit of tokens per turn."""
    cut_turns: float
    out_of_context: float


@dataclass(frozen=True)
class FamilyRates:
    """Rates of the measures of `Family.measure`."""

    format: Rate | None = None
    field_accuracy: Rate | None = None
    """Mean over episodes of the share of right fields."""
    fields: dict[str, Rate] = field(default_factory=dict)
    others: dict[str, Rate] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelResult:
    """Result of one model for one kind. Rates are over the episodes that did not fail."""

    rows: int
    """Number of rows with an episode that did not fail."""
    episodes: int
    """Number of episodes that did not fail."""
    failures: dict[str, int]
    """Number of failed episodes by stop reason. The environment, the endpoint or an interruption caused them, not the
    policy."""
    success: Rate
    success_with_failures: float
    """Success if the failed episodes are counted as not solved."""
    pass_at_k: list[PassAtK]
    """Probability that the scorer calls at least one of k sampled episodes solved."""
    reward_pass_at_k: list[PassAtK]
    """Probability that the reward of at least one of k sampled episodes reaches `evaluation.claim_threshold`."""
    reward: Spread
    completion: Rate
    """Share of episodes with an answer that the task can read, right or wrong."""
    stops: dict[str, int]
    budgets: Budgets
    lengths: Lengths
    tools: list[ToolUse]
    agreement: Agreement
    components: dict[str, float]
    measures: FamilyRates
    seen: list[ScoredEpisode] = field(repr=False)
    """The episodes that did not fail."""


def result_of(groups: Sequence[Group], kind: str, config: EvaluationConfig, family: Family) -> ModelResult | None:
    """Return the result of some groups; None if every episode failed, or there are none.

    Raises:
        UserError: A measure of the family is not in [0, 1].
    """
    whole = [Group(g.group_id, g.row, [t for t in g.trajectories if not failed(t)]) for g in groups]
    judged = [group for group in whole if group.trajectories]
    if not judged:
        return None
    seen = episodes_of(judged)
    trajectories = [e.trajectory for e in seen]
    lost = [t for group in groups for t in group.trajectories if failed(t)]
    thresholds, level = Thresholds.of(config), config.confidence
    solved, claimed = successes(judged, thresholds.success), claims(judged, thresholds.claim)
    ks = config.pass_k_values if kind == "sampled" else []
    return ModelResult(
        rows=len(judged),
        episodes=len(seen),
        failures=dict(Counter(str(t.stop_reason) for t in lost)),
        success=success_rate(solved, level),
        success_with_failures=sum(map(sum, solved)) / (len(seen) + len(lost)),
        pass_at_k=pass_at_k_rates(solved, ks, level),
        reward_pass_at_k=pass_at_k_rates(claimed, ks, level),
        reward=_spread(t.reward for t in trajectories),
        completion=_rate(judged, {id(t): float(is_completed(t)) for t in trajectories}, level),
        stops=dict(Counter(str(t.stop_reason) for t in trajectories).most_common()),
        budgets=_budgets(trajectories),
        lengths=_lengths(trajectories),
        tools=tool_use(trajectories),
        agreement=_agreement(judged, config),
        components=mean_components(trajectories),
        measures=_family_rates(seen, family, level),
        seen=seen,
    )


def failed(trajectory: Trajectory) -> bool:
    """Whether the trajectory failed or has no turn, so it is no evidence about the policy."""
    return trajectory.stop_reason in (*FAILED, StopReason.ABORTED) or not trajectory.turns


def pass_at_k_rates(solved: Sequence[Sequence[float]], ks: Iterable[int], level: float) -> list[PassAtK]:
    """Return pass@k for every k for which any row has enough samples.

    Args:
        solved: Rows with 1.0 or 0.0 for each sample.
    """
    rates = []
    for k in sorted(set(ks)):
        rows = [samples for samples in solved if len(samples) >= k]
        if rows:
            worth = sum(len(samples) // k for samples in rows)  # disjoint trials of k samples
            rates.append(PassAtK(k, mean_rate(pass_at_k_by_prompt(rows, k), worth, level), len(rows)))
    return rates


def _spread(values: Iterable[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread


def _rate(groups: Sequence[Group], values: dict[int, float], level: float) -> Rate:
    return success_rate([[values[id(t)] for t in group.trajectories] for group in groups], level)


def _budgets(trajectories: Sequence[Trajectory]) -> Budgets:
    turns = [turn for t in trajectories for turn in t.turns]
    return Budgets(
        out_of_turns=fmean(map(is_out_of_turns, trajectories)),
        at_token_cap=fmean(map(is_cut, trajectories)),
        cut_turns=fmean(map(at_cap, turns)),
        out_of_context=fmean(t.stop_reason == StopReason.CONTEXT_LIMIT for t in trajectories),
    )


def _lengths(trajectories: Sequence[Trajectory]) -> Lengths:
    return Lengths(
        turns=Spread.of(len(t.environment_turns) for t in trajectories),
        response_tokens=Spread.of(known(sampled_tokens(turn) for t in trajectories for turn in t.turns)),
        episode_tokens=Spread.of(known(map(episode_tokens, trajectories))),
    )


def _agreement(groups: Sequence[Group], config: EvaluationConfig) -> Agreement:
    thresholds = Thresholds.of(config)
    trajectories = [t for group in groups for t in group.trajectories]
    verdicts = {id(t): thresholds.verdict(t) for t in trajectories}
    counts = Counter(verdicts.values())
    right = [t.reward for t in trajectories if succeeded(t, thresholds.success)]
    wrong = [t.reward for t in trajectories if not succeeded(t, thresholds.success)]
    return Agreement(
        claims=fmean(claimed(t, thresholds.claim) for t in trajectories),
        lenient=counts[TrajectoryAgreement.LENIENT],
        strict=counts[TrajectoryAgreement.STRICT],
        agree=_rate(
            groups, {key: float(v == TrajectoryAgreement.AGREE) for key, v in verdicts.items()}, config.confidence
        ),
        ranking=ranking(right, wrong) if right and wrong else None,
    )


def _family_rates(seen: Sequence[ScoredEpisode], family: Family, level: float) -> FamilyRates:
    by_row: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode, found in zip(seen, measured(seen, family), strict=False):  # empty if the family has no `measure`
        for name, value in found.items():
            by_row[name][episode.trajectory.group_id].append(float(value))
        for accuracy in field_accuracies([found]):
            by_row[FIELD][episode.trajectory.group_id].append(accuracy)
    rates = {name: success_rate(list(rows.values()), level) for name, rows in by_row.items()}
    fields = {
        name.removeprefix(FIELD): rate for name, rate in rates.items() if name.startswith(FIELD) and name != FIELD
    }
    others = {name: rate for name, rate in rates.items() if name != FORMAT and not name.startswith(FIELD)}
    return FamilyRates(rates.get(FORMAT), rates.get(FIELD), fields, others)
