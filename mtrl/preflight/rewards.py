"""Checks of the reward: it survives any response, rewards gold in full, stays in range, varies, and is bounded."""

from __future__ import annotations

import math
from collections import defaultdict

from mtrl.environments.players import REPEAT_LAST, no_more_responses
from mtrl.errors import UserError
from mtrl.preflight.agreement import changed_gold
from mtrl.preflight.context import CheckContext, at_most, lacks
from mtrl.preflight.responses import IDLE, LONG, padded
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.stage import SCORED, Script, ScriptedEpisode, Stage, scripted
from mtrl.types import EPSILON, StopReason

NOT_FINITE = "a finite number"
"""Common part of the error messages about rewards and scores that are NaN, infinite or text."""
MORE_TURNS = 4
"""Factor by which `generator.max_turns` is raised to search for a reward that grows with the turns."""
GROWTH = 1.5
"""Factor of growth of the reward, with `MORE_TURNS` times the turns, below which the reward counts as bounded."""
SHORT = (0, 8)
"""Numbers of filler characters with which a response counts as short: none, and one word. A parser that allows no text
before the answer rejects the answer after one word as well, so that its reward for rejected text is not taken for a
reward for length."""


def robust(context: CheckContext) -> CheckResult:
    """Check that no response breaks an episode."""
    # An error of gold concerns its row, on which every player fails; the check gold reports it.
    tried = (*context.demonstrated, *context.fuzz, *context.guessed, *context.once(changed_gold))
    episodes = [episode for episode in tried if context.key(episode) not in context.unplayable]
    found = [f"{_who(e)}: {e.error}" for e in episodes if e.error and NOT_FINITE not in e.error]
    if found:
        return failed(
            f"{len(found)} of {len(episodes)} episodes broke. {found[0]}",
            "answer any response of a model with an observation; raise an error only for a broken row",
            found,
        )
    ended = [no_more_responses(e.row, len(e.responses)) for e in context.demonstrated if e.stopped_by_player]
    if ended:
        return failed(ended[0], REPEAT_LAST, ended)
    if not episodes:
        return skipped("gold has an error on every row that is used here; see gold")
    hostile = sum(episode.label.startswith("fuzz ") for episode in episodes)
    return passed(f"{len(episodes)} episodes, {hostile} of them with hostile text: none broke")


def gold(context: CheckContext) -> CheckResult:
    """Check that gold receives the full reward and a score of 1."""
    episodes = [*context.gold, *context.gold_elsewhere]
    if not episodes:
        return skipped(str(context.needs_gold()))
    score_low = [
        f"{_who(e)}: the score is {e.score:g}{_reason(context, e)}" for e in episodes if not context.succeeds(e)
    ]
    reward_low = [
        f"{_who(e)}: the reward is {context.claimed_reward(e):g}"
        for e in episodes
        if context.succeeds(e) and not context.claims(e)
    ]
    found = [*score_low, *reward_low]
    count = f"{len(episodes)} of {len(context.all_rows)} rows"
    if found:
        return failed(
            f"on {count}, gold fails on {len(found)}. {at_most(found, 2)}",
            "make reward and scorer both give the gold response 1, or correct the rows: no policy can learn it; a "
            "reward of another scale needs evaluation.claim_threshold",
            found,
        )
    return passed(f"on {count} gold gets the full reward and scores 1")


def reward_range(context: CheckContext) -> CheckResult:
    """Check that rewards and scores are finite, rewards are in [-1, 1], and components with a weight are reported."""
    episodes = [*context.gold, *context.demonstrated, *context.fuzz, *_spam(context, context.stage, 1)]
    not_finite = [f"{_who(e)}: {e.error}" for e in episodes if e.error and NOT_FINITE in e.error]
    broken = [error for error in not_finite if SCORED not in error]
    if broken:
        return failed(
            f"{len(broken)} of {len(episodes)} episodes have a reward that is no finite number. {broken[0]}",
            "return a float on every turn; 0.0 without a reward",
            broken,
        )
    if not_finite:
        return failed(
            f"{len(not_finite)} of {len(episodes)} episodes have a score that is no finite number. {not_finite[0]}",
            "return a float from score; 1.0 is success",
            not_finite,
        )
    try:
        context.stage.composer.check()
    except UserError as error:
        return failed(str(error), "correct the name in reward.components, or let the environment report it")
    values = [e.reward for e in episodes if not e.error]
    broke = [e for e in episodes if e.trajectory.stop_reason != StopReason.TIMEOUT]
    if not values and broke:
        return failed(f"no episode ended without an error. {_who(broke[0])}: {broke[0].error}", "fix the environment")
    if not values:
        return skipped("no episode ended in time; see robust")
    low, high = min(values), max(values)
    evidence = f"{len(values)} episodes have total rewards from {low:.2f} to {high:.2f}"
    if low < -1 - EPSILON or high > 1 + EPSILON:
        return warned(f"{evidence}, outside of [-1, 1]", "scale it: 1 for a right answer, nothing below -1")
    return passed(evidence)


def spread(context: CheckContext) -> CheckResult:
    """Check that the demonstrator's rewards differ, so that there is a learning signal."""
    if context.family.demonstrate is None:
        return skipped(lacks(context.family, "demonstrate"))
    if not context.demonstrated:
        return skipped("the demonstrator rejects all of these rows; foothold looks at the policy itself")
    values = [e.reward for e in context.demonstrated if not e.error]
    if len(values) < 2:
        return skipped("fewer than two episodes of the demonstrator ended; see robust")
    mean = math.fsum(values) / len(values)
    successes = sum(context.succeeds(e) for e in context.demonstrated)
    evidence = (
        f"{len(values)} episodes of the demonstrator: reward {min(values):.2f} to {max(values):.2f}, "
        f"{successes} successes"
    )
    if max(values) - min(values) < EPSILON:
        fix = "reward partial progress, or make the task easier" if mean < 0.5 else "take a harder task"
        return failed(f"{evidence}: all rewards are {mean:.2f}", f"{fix}; groups of equal rewards teach nothing")
    return passed(evidence)


def growth(context: CheckContext) -> CheckResult:
    """Check that no part of the reward grows without bound with the number of turns or the length of a response."""
    few, many = context.config.generator.max_turns, MORE_TURNS * context.config.generator.max_turns
    few_sums, many_sums = (_sums(_spam(context, context.stage_with(turns), 3)) for turns in (few, many))
    common = few_sums.keys() & many_sums.keys()
    rising = [
        _tell(key, few_sums, many_sums, few, many) for key in sorted(common) if _grows(few_sums[key], many_sums[key])
    ]
    falling = [
        _tell(key, few_sums, many_sums, few, many) for key in sorted(common) if _grows(-few_sums[key], -many_sums[key])
    ]
    if rising:
        return failed(
            f"the reward of one repeated move grows without bound. {at_most(rising, 2)}",
            "reward the result of a call, not the call; or cap the sum",
            rising,
        )
    longer = _longer(context)
    if longer:
        return failed(
            f"longer responses get more reward. {at_most(longer, 2)}", "take the length out of the reward", longer
        )
    if falling:
        return warned(
            f"a cost grows with the turns. {at_most(falling, 2)}",
            "a policy may answer before it knows enough; cap the cost",
            falling,
        )
    if not common:
        return skipped("no episode ended without an error; see robust")
    return passed(
        f"{len({move for move, _ in common})} repeated moves, {few} and {many} turns: no part of the reward grows"
    )


def _grows(few: float, many: float) -> bool:
    return many > EPSILON and many > GROWTH * few + EPSILON


def _tell(key: tuple[str, str], few_sums: dict, many_sums: dict, few: int, many: int) -> str:
    move, part = key
    return f"{move!r}: {part} {few_sums[key]:.2f} in {few} turns, {many_sums[key]:.2f} in {many}"


def _sums(episodes: list[ScriptedEpisode]) -> dict[tuple[str, str], float]:
    """Return, for each pair (move, part of the reward), the sum over an episode that is largest in magnitude."""
    sums: dict[tuple[str, str], float] = {}
    for episode in episodes:
        sums_of_parts: dict[str, float] = defaultdict(float)
        for turn in episode.trajectory.turns:
            for name, value in turn.components.items():
                sums_of_parts[name] += value
        for name, value in {**sums_of_parts, "reward": episode.reward}.items():
            key = (episode.label, name)
            sums[key] = max(sums.get(key, value), value, key=abs)
    return sums


def _spam(context: CheckContext, stage: Stage, rows: int) -> list[ScriptedEpisode]:
    """Run episodes that repeat one move, on the first rows; failed episodes are left out unless the reward caused the
    failure."""
    scripts = [
        Script(row, scripted([], then=move), move[:40])
        for row in context.rows[:rows]
        for move in dict.fromkeys([*context.tool_responses, *context.wrong_answers(row), *IDLE])
    ]
    return [e for e in stage.run(scripts) if not e.error or NOT_FINITE in e.error]


def _longer(context: CheckContext) -> list[str]:
    """Return the rows on which the same answer receives more reward after much filler than after little. The rise may
    come at once, as with a bonus that has a threshold or a cap. A wrong answer that the filler makes right is no
    finding."""
    found = []
    for episode in context.solved[:3]:
        right = episode.responses[-1]
        for text in (right, *context.wrong.get(context.key(episode), [])[:1]):
            played = [e for e in _after_filler(context, episode, text) if text == right or not context.succeeds(e)]
            rewards = {int(e.label): e.reward for e in played if not e.error}
            short = [rewards[n] for n in SHORT if n in rewards]
            more = [n for n in LONG if short and rewards.get(n, -math.inf) > max(short) + EPSILON]
            if more:
                found.append(
                    f"row {episode.row['id']}, {'the right' if text == right else 'a wrong'} answer: {max(short):.2f}, "
                    + ", ".join(f"{rewards[n]:.2f} after {n:,} characters of filler" for n in more)
                )
    return found


def _after_filler(context: CheckContext, episode: ScriptedEpisode, text: str) -> list[ScriptedEpisode]:
    """Give the last response as `text` after filler, until the episode ends; the label is the length of the filler."""
    texts = {n: padded(text, n) for n in (*SHORT, *LONG)}
    return context.stage.run(
        Script(episode.row, scripted(episode.responses[:-1], then=longer), str(n)) for n, longer in texts.items()
    )


def _who(episode: ScriptedEpisode) -> str:
    return f"row {episode.row['id']}, {episode.label}"


def _reason(context: CheckContext, episode: ScriptedEpisode) -> str:
    if episode.error:
        return f" ({episode.error})"
    explain = context.family.explain
    explanation = explain(episode.trajectory, episode.row) if explain is not None else None
    return f" ({explanation})" if explanation else f", stopped: {episode.trajectory.stop_reason}"
