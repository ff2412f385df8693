"""Reward against scorer: the reward never counts an episode as solved that the strict scorer does not."""

from __future__ import annotations

from collections.abc import Iterable

from mtrl.preflight.context import CheckContext, at_most
from mtrl.preflight.mutations import mutations
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.stage import Script, ScriptedEpisode, scripted


def agreement(context: CheckContext) -> CheckResult:
    """Check that each episode that the reward counts as a success is a success for the scorer too.

    The episodes are those of the demonstrator, of gold, of fuzz, and of gold with slight changes.
    """
    changed = context.once(changed_gold)
    episodes = [e for e in (*context.gold, *context.demonstrated, *context.fuzz, *changed) if not e.error]
    if not episodes:
        return skipped("no episode ended without an error; see robust")
    result = compare(context, episodes)
    if result is not None:
        return result
    kinds = len({episode.label for episode in changed})
    return passed(
        f"{len(episodes)} episodes, {len(changed)} with gold changed in {kinds} ways: reward and scorer never disagree"
    )


def compare(context: CheckContext, episodes: Iterable[ScriptedEpisode]) -> CheckResult | None:
    """Return the verdict on the disagreements; None if reward and scorer agree on all episodes."""
    episodes = list(episodes)
    lenient = [e for e in episodes if context.claims(e) and not context.succeeds(e)]
    strict = [e for e in episodes if context.succeeds(e) and not context.claims(e)]
    if lenient:
        found = by_kind(context, lenient, episodes)
        return failed(
            f"the reward counts {len(lenient)} of {len(episodes)} episodes as solved that the scorer does not. "
            f"{at_most(found, 2)}",
            "let the reward read the answer exactly as the scorer does: one tag, one place, nothing else",
            found,
        )
    if strict:
        found = by_kind(context, strict, episodes)
        return warned(
            f"the scorer counts {len(strict)} of {len(episodes)} episodes as solved that the reward does not. "
            f"{at_most(found, 2)}",
            "reward these episodes, or let the scorer refuse them",
            found,
        )
    return None


def by_kind(context: CheckContext, odd: list[ScriptedEpisode], episodes: list[ScriptedEpisode]) -> list[str]:
    """Return one sentence for each kind of response, the most frequent kind first."""
    kinds: dict[str, list[ScriptedEpisode]] = {}
    for episode in odd:
        kinds.setdefault(episode.label, []).append(episode)
    return [
        f"{label}: {len(found)} of {sum(e.label == label for e in episodes)}, e.g. row {found[0].row['id']}, "
        f"{found[0].responses[-1][-80:]!r}: reward {context.claimed_reward(found[0]):.2f}, score {found[0].score:g}"
        for label, found in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]


def changed_gold(context: CheckContext) -> list[ScriptedEpisode]:
    """Run an episode for every change of every solved row's last response, which is repeated until the episode ends."""
    scripts = []
    for episode in context.solved:
        wrong = next(iter(context.wrong.get(context.key(episode), [])), None)
        for name, text in mutations(episode.responses[-1], wrong).items():
            scripts.append(Script(episode.row, scripted(episode.responses[:-1], then=text), name))
    return context.stage.run(scripts)
