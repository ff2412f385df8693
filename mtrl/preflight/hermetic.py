"""Hermetic environments: the same actions give the same observations and rewards in every process, at any time, and
beside any other episodes."""

from __future__ import annotations

from mtrl.preflight.context import CheckContext, at_most
from mtrl.preflight.result import CheckResult, failed, passed, skipped, warned
from mtrl.preflight.state import changed, snapshot

CONCURRENT = 8
"""Number of threads."""


def hermetic(context: CheckContext) -> CheckResult:
    """Check that fresh processes with different hash seeds, time zones and times of day produce the same episodes."""
    if (online := online_warning(context)) is not None:
        return online
    if context.processes < 2:
        return skipped(f"preflight.processes={context.processes} compares nothing; set it to 2 or more")
    repeats = context.repeats
    if not repeats.common:
        return skipped(f"no episode ended in every fresh process within {context.seconds:g} s; raise preflight.seconds")
    found = repeats.unsteady()
    count = f"{len(repeats.common)} episodes in {repeats.processes} fresh processes"
    if found:
        return failed(
            f"{count}: {len(found)} differ. {found[0]}",
            "seed every random choice from the row, sort what comes from sets and folders, leave the time and process "
            "ids out of texts",
            found,
        )
    return passed(f"{count} with other hash seeds and time zones: the same to the byte")


def online_warning(context: CheckContext) -> CheckResult | None:
    """Return the warning about a task that declares itself not hermetic (`Family.offline`); None for other tasks."""
    if not context.replaced:
        return None
    setting = next((f"{key}={value}" for key, value in context.replaced.items() if isinstance(value, str)), "")
    return warned(
        f"{context.family.name} is not hermetic: with environment.config.{setting} a server writes observations, which "
        "differ each time. All checks replace it by the task's offline settings",
        "expect that resume and rescoring do not repeat such a run exactly",
    )


def leaks(context: CheckContext) -> CheckResult:
    """Check that an episode is the same alone, after others, twice in a row, and interleaved with others."""
    repeats, before = context.repeats, snapshot(context.family)
    scripts = [action.script(number) for number, action in enumerate(repeats.actions)]
    in_turn = [*reversed(scripts), *(script for script in scripts for _ in range(2))]
    episodes = repeats.comparable(
        context.stage.run(in_turn, workers=1, at_once=1) + context.stage.run(scripts, workers=1, at_once=len(scripts))
    )
    found = repeats.deviations(episodes)
    state = changed(before, snapshot(context.family))
    names = f"; changed meanwhile: {at_most(state)}" if state else ""
    if found:
        return failed(
            f"{len(found)} of {len(episodes)} episodes depend on earlier ones{names}. {found[0]}",
            "store what an episode changes on the instance: set it in `reset`, not on the class or the module",
            [*state, *found],
        )
    if not episodes:
        return _nothing_to_compare(context)
    if state:
        return warned(
            f"{len(episodes)} episodes are as if alone, but these variables change meanwhile: {at_most(state)}",
            "make sure that it is only a cache, or store it on the instance",
            state,
        )
    return passed(f"{len(episodes)} episodes in other orders, doubled and interleaved: as if alone")


def concurrency(context: CheckContext) -> CheckResult:
    """Check that episodes on several threads do not disturb each other."""
    repeats = context.repeats
    scripts = [action.script(number) for number, action in enumerate(repeats.actions)]
    episodes = repeats.comparable(context.stage.run(scripts * 2, workers=CONCURRENT, at_once=4 * CONCURRENT))
    found = repeats.deviations(episodes)
    if found:
        return failed(
            f"on {CONCURRENT} threads {len(found)} of {len(episodes)} episodes differ. {found[0]}",
            "share nothing that is written to; give every episode its own connection, folder and random generator",
            found,
        )
    if not episodes:
        return _nothing_to_compare(context)
    return passed(f"{len(episodes)} episodes on {CONCURRENT} threads at once: the same to the byte")


def _nothing_to_compare(context: CheckContext) -> CheckResult:
    if not context.repeats.steady:
        return skipped("no episode is the same in two fresh processes; see hermetic")
    return skipped(f"no episode ended within {context.seconds:g} s; raise preflight.seconds")
