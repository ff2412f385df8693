"""The local optimum: the reward of a policy that never solves the task, compared with the reward of solving it at the
initial success rate.

RL reinforces the behaviour with the higher reward. If a strategy that never solves the task receives more reward than
the few successes of a weak policy, the policy gives up the successes and stays at that strategy. The usual case is
well-formed wrong answers under a reward for form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mtrl.preflight.context import CheckContext, lacks
from mtrl.preflight.responses import IDLE, LONG, nonsense, padded
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.stage import Script, scripted
from mtrl.types import EPSILON

FIX = (
    "reward the task alone; or subtract the reward for partial progress at the end of an episode that does not solve "
    "the task"
)


@dataclass(frozen=True)
class Unsolved:
    """The best return found among strategies that never solve the task."""

    reward: float
    """Mean return over rows."""
    how: str
    kinds: int
    """Number of strategies tried."""


def local_optimum(context: CheckContext) -> CheckResult:
    """Check that strategies that never solve the task receive less reward than the demonstrator's successes."""
    episodes = [episode for episode in context.demonstrated if not episode.error]
    if not episodes:
        if context.family.demonstrate is None:
            return skipped(lacks(context.family, "demonstrate", "gold"))
        if not context.demonstrated:
            return skipped("the demonstrator rejects all of these rows")
        return skipped("no episode of the demonstrator ended without an error; see robust")
    wins = sum(context.succeeds(episode) for episode in episodes)
    return compare(context, wins / len(episodes), f"the demonstrator solves {wins} of {len(episodes)}")


def compare(context: CheckContext, success: float, who: str) -> CheckResult:
    """Return the verdict for a policy that solves the share `success` of its episodes."""
    if reason := context.needs_gold():
        return skipped(reason)
    found = context.once(best_unsolved)
    if found is None:
        return skipped("no attempt ended without an error or a success")
    solving = math.fsum(episode.reward for episode in context.solved) / len(context.solved)
    evidence = (
        f"the best of {found.kinds} strategies that never solve the task earns {found.reward:.2f} ({found.how}); "
        f"solving earns {solving:.2f}, and {who}: {success * solving:.2f}"
    )
    if found.reward > success * solving + EPSILON:
        return failed(f"{evidence}. A policy that starts there learns not to solve it", FIX)
    if found.reward > EPSILON:
        return warned(f"{evidence}. A policy that starts lower may end there", FIX)
    return passed(evidence)


def best_unsolved(context: CheckContext) -> Unsolved | None:
    """Run each strategy on the rows on which exploits are searched for, and return the one with the best mean return.
    An episode that solves its row does not count."""
    scripts = [script for episode in context.solved for script in _kinds(context, episode.row, episode.responses)]
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for episode in context.stage.run(scripts):
        if not episode.error and not context.succeeds(episode):
            rewards[episode.label].append(episode.reward)
    failures = [
        episode.reward for episode in context.demonstrated if not episode.error and not context.succeeds(episode)
    ]
    if failures:
        rewards["the failures of the demonstrator"] = failures
    means = {how: math.fsum(values) / len(values) for how, values in rewards.items()}
    how = max(means, key=lambda each: means[each], default=None)
    return None if how is None else Unsolved(means[how], how, len(means))


def _kinds(context: CheckContext, row: dict, right: list[str]) -> Iterator[Script]:
    """Yield a script for each strategy that applies to every row without solving it. Of strategies with equal rewards
    the first is reported, so the simple ones come first."""
    wrong = [*context.wrong.get(str(row["id"]), [])[:1], *nonsense(right[-1])[:1]]
    for name, answer in zip(("a wrong answer", "nonsense in its form"), wrong, strict=False):
        yield from _answered(row, right, name, answer)
    for number, move in enumerate(context.tool_responses, 1):
        yield Script(row, scripted([], then=move), f"move {number} of its players, repeated")
    yield Script(row, scripted([], then=IDLE[0]), "silence")
    for answer in wrong[:1]:  # `growth` tries longer filler on a few rows
        name = f"a wrong answer after {LONG[0]:,} characters of filler"
        yield from _answered(row, right, name, padded(answer, LONG[0]))


def _answered(row: dict, right: list[str], name: str, answer: str) -> Iterator[Script]:
    """Yield the two ways to give an answer: at once, and after all right responses but the last."""
    yield Script(row, scripted([], then=answer), f"{name}, repeated")
    yield Script(row, scripted(right[:-1], then=answer), f"all right but the answer, then {name}")
