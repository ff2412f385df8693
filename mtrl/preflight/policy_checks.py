"""Checks of the policy that a run would start from: it sometimes succeeds, and its turns and tokens suffice.

All these checks read the same rollouts, sampled as in training. This is the only part of the pre-flight that needs
torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from mtrl.config.derived import distils
from mtrl.config.mixture import source_of
from mtrl.config.schema import Config, RolloutsConfig
from mtrl.preflight.agreement import compare
from mtrl.preflight.context import CheckContext
from mtrl.preflight.optimum import compare as compare_with_unsolved
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.sources import with_settings
from mtrl.preflight.stage import Script, ScriptedEpisode, scripted
from mtrl.scoring.measures import is_completed, is_cut
from mtrl.types import EPSILON, Group, Row, StopReason, Trajectory

if TYPE_CHECKING:
    from mtrl.trainer.setup.warm_start import OnStep

AT_CAP = 0.05
"""Share of episodes with a turn at the token limit; at this share or above, the limit is too low."""
OUT_OF_TURNS = 0.10
"""Share of episodes that run out of turns; at this share or above, the turns are too few."""
FEW_INFORMATIVE = 0.25
"""Expected share of groups with different rewards; below this share, most of a step is wasted."""


@dataclass(frozen=True)
class Baseline:
    """The rollouts of the policy before training."""

    groups: list[Group]
    max_context_length: int
    """Maximum number of tokens of a conversation."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def roll_out(
    config: Config, contexts: Mapping[str, CheckContext], rollouts: int, on_warm_start: OnStep
) -> dict[str, Baseline]:
    """Sample about `rollouts` episodes of the policy on each task, in groups of `algorithm.group_size`, on rows spread
    over the training split. A mixture has one policy, as in its run.

    Args:
        contexts: the inputs of the checks by source; one by an empty name without a mixture.

    Returns:
        The rollouts by source, for those that have training rows.
    """
    from mtrl.rewards.mixture import make_composer
    from mtrl.rollout.rollouts import Rollouts
    from mtrl.scoring.heldout import score_groups
    from mtrl.trainer.setup.parts import set_up
    from mtrl.trainer.setup.servers import are_external

    is_mixture = bool(config.environments)
    if is_mixture:
        offline = {name: each.config.environment.config for name, each in contexts.items() if each.replaced}
        config = with_settings(config, offline)
    else:
        config = contexts[""].config
    config = replace(config, rollouts=RolloutsConfig())  # a hundred episodes need no workers
    parts, composer = set_up(config, on_warm_start), make_composer(config)
    sizes = {name: context.config.algorithm.group_size for name, context in contexts.items()}
    rows = [row for name, size in sizes.items() for row in _evenly(_rows_of(name, parts.splits.train), rollouts / size)]

    def source(row: Row) -> str:
        return source_of(str(row["id"])) if is_mixture else ""

    async def sample() -> list[Group]:
        if are_external(config):
            await parts.engine.load_weights(parts.learners.weights(), 0)
        sampler = Rollouts(parts.loop, config.seed, max_failed_share=1.0)
        report = await sampler.collect("preflight", rows, lambda row: sizes[source(row)], parts.sampling)
        for group in report.groups:
            await composer.apply_async(group)
        await score_groups(parts.family, report.groups, config.environment.episode_timeout)
        await parts.loop.close()
        await parts.engine.close()
        return report.groups

    found: dict[str, list[Group]] = {}
    for group in asyncio.run(sample()):
        found.setdefault(source(group.row), []).append(group)
    limits = parts.loop.limits_of_sources
    return {name: Baseline(own, limits.get(name, parts.loop.limits).max_context_length) for name, own in found.items()}


def _rows_of(source: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a source of a mixture; all rows for an empty name."""
    return [row for row in rows if not source or source_of(str(row["id"])) == source]


def _evenly(rows: Sequence[Row], count: float) -> list[Row]:
    """Return `count` rows, rounded up, or all if there are fewer, spread over the whole list."""
    chosen = min(max(1, math.ceil(count)), len(rows))
    return [rows[index * len(rows) // chosen] for index in range(chosen)]


def success_rate(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that the policy succeeds sometimes, and not always."""
    wins, trials = _successes(context, baseline)
    rewards = [t.reward for t in baseline.trajectories]
    evidence = f"{wins} of {trials} sampled episodes succeed; reward {min(rewards):.2f} to {max(rewards):.2f}"
    if wins == 0:
        return failed(
            evidence,
            "stop and simplify: an easier task, a better model, or fine-tuning first (mtrl sft); "
            "RL amplifies what happens already",
        )
    if max(rewards) - min(rewards) < EPSILON:
        return failed(f"{evidence}: all have the same reward", "change the reward: equal rewards teach nothing")
    if wins == trials:
        return warned(evidence, "take a harder task: there is nothing left to learn here")
    return passed(evidence)


def policy_optimum(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that strategies that never solve the task receive less reward than the policy's own successes."""
    wins, trials = _successes(context, baseline)
    return compare_with_unsolved(context, wins / trials, f"the policy solves {wins} of {trials}")


def policy_agreement(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check on the policy's own responses that the reward never counts an episode as solved that the scorer does
    not."""
    episodes = [
        ScriptedEpisode(Script(group.row, scripted([]), "policy"), trajectory)
        for group in baseline.groups
        for trajectory in group.trajectories
        if trajectory.turns and trajectory.error is None
    ]
    if not episodes:
        return skipped("no episode of the policy ended without an error")
    return compare(context, episodes) or passed(
        f"{len(episodes)} episodes of the policy: reward and scorer never disagree"
    )


def failures(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that the policy's episodes end without an error."""
    broken = [t for t in baseline.trajectories if t.error]
    if broken:
        first = str(broken[0].error).partition("\n")[0]
        return failed(
            f"{len(broken)} of {len(baseline.trajectories)} episodes failed. {first}",
            "fix the environment, or raise environment.step_timeout",
        )
    return passed(f"{len(baseline.trajectories)} episodes, none failed")


def token_cap(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that few episodes have a turn that the token limit cuts."""
    cap = context.config.generator.sampling_params.max_generate_length
    share = fmean(map(is_cut, baseline.trajectories))
    longest = max((len(turn.action_ids) for t in baseline.trajectories for turn in t.turns), default=0)
    evidence = (
        f"{share:.1%} of {len(baseline.trajectories)} episodes have a turn that reaches the {cap} tokens of a turn; "
        f"the longest has {longest}"
    )
    if share >= AT_CAP:
        return warned(evidence, f"set generator.sampling_params.max_generate_length={2 * cap}")
    return passed(evidence)


def out_of_turns(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that few episodes run out of turns."""
    limits = (StopReason.MAX_TURNS, StopReason.TURN_TOKEN_LIMIT)
    share = fmean(t.stop_reason in limits and not is_completed(t) for t in baseline.trajectories)
    evidence = f"{share:.1%} of {len(baseline.trajectories)} episodes run out of turns without a final answer"
    if share >= OUT_OF_TURNS:
        more = math.ceil(1.5 * context.config.generator.max_turns)
        return warned(evidence, f"set generator.max_turns={more}, or teach the policy to answer")
    return passed(evidence)


def context_length(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that no conversation reaches the context length of the model."""
    limit = baseline.max_context_length
    used = [t.context_tokens for t in baseline.trajectories if t.turns]
    stopped = sum(t.stop_reason == StopReason.CONTEXT_LIMIT for t in baseline.trajectories)
    prompts = max((len(t.turns[0].observation_ids) for t in baseline.trajectories if t.turns), default=0)
    evidence = f"prompts up to {prompts} tokens, conversations up to {max(used, default=0)} of {limit}"
    if stopped:
        return warned(f"{evidence}; {stopped} episodes were stopped by it", "raise generator.max_context_length")
    return passed(evidence)


def groups(context: CheckContext, baseline: Baseline) -> CheckResult:
    """Check that enough groups have both successes and failures; the expected share is 1 - (1-p)^G - p^G. In self-play
    the trajectories of each role are a group of their own, as in training."""
    if distils(context.config):
        return passed("the teacher of distillation gives every group an advantage")
    wins, trials = _successes(context, baseline)
    size, per_step = context.config.algorithm.group_size, context.config.trainer.prompts_per_step
    compared = [part for group in baseline.groups for part in group.by_role()]
    roles = {part.role: Baseline([], 0) for part in compared}
    for part in compared:
        roles[part.role].groups.append(part)
    expected = fmean(informative(won / of, size) for won, of in (_successes(context, own) for own in roles.values()))
    seen = fmean(len({round(t.reward, 9) for t in part.trajectories}) > 1 for part in compared)
    evidence = (
        f"success {wins / trials:.1%}: {expected:.0%} of groups of {size} should hold both, {expected * per_step:.1f} "
        f"per step; {seen:.0%} of {len(compared)} had different rewards"
    )
    if max(expected, seen) < FEW_INFORMATIVE or min(expected, seen) * per_step < 1:
        return warned(evidence, "raise algorithm.group_size, or set algorithm.dynamic_sampling_rounds=3")
    return passed(evidence)


def informative(rate: float, size: int) -> float:
    """Return the expected share of groups with both outcomes, for groups of `size` independent trials with success rate
    `rate`."""
    return 1.0 - (1.0 - rate) ** size - rate**size


ModelCheck = Callable[[CheckContext, Baseline], CheckResult]
CHECKS: tuple[tuple[str, ModelCheck], ...] = (
    ("foothold", success_rate),
    ("policy_optimum", policy_optimum),
    ("failures", failures),
    ("policy_agreement", policy_agreement),
    ("token_cap", token_cap),
    ("out_of_turns", out_of_turns),
    ("context", context_length),
    ("groups", groups),
)


def bound(context: CheckContext, baseline: Baseline) -> Iterator[tuple[str, Callable[[CheckContext], CheckResult]]]:
    """Yield the checks as functions of the context alone."""
    for name, check in CHECKS:
        yield name, lambda _, check=check: check(context, baseline)  # type: ignore[misc]


def _successes(context: CheckContext, baseline: Baseline) -> tuple[int, int]:
    threshold = context.config.evaluation.success_threshold - EPSILON
    scores = [t.score or 0.0 for t in baseline.trajectories]
    return sum(score >= threshold for score in scores), max(len(scores), 1)
