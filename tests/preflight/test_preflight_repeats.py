"""Repeated episodes: only those that ended in every fresh process are compared and counted."""

from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.repeats import Repeats
from mtrl.preflight.result import Status
from tests.preflight.test_preflight_optimum import broken

NAMES = ("hermetic", "leaks", "concurrency")


def results_of(monkeypatch, *fresh):
    """Return the results of the checks, with a function from all transcripts to those of each fresh process."""

    def cut(repeats, folder):
        stage = repeats.stage
        episodes = stage.run(action.script(number) for number, action in enumerate(repeats.actions))
        whole = {int(episode.label): episode.transcript() for episode in episodes}
        return [own(whole) for own in fresh]

    monkeypatch.setattr(Repeats, "in_fresh_processes", cut)
    context = broken("sound")
    context.processes = len(fresh)
    return context, {result.name: result for result in run(context, [(name, CHECKS[name]) for name in NAMES])}


def first(count):
    return lambda whole: {n: whole[n] for n in list(whole)[:count]}


def test_episodes_that_a_process_did_not_reach_are_left_out_and_counted(monkeypatch):
    context, results = results_of(monkeypatch, first(9), first(5))
    late = len(context.repeats.actions) - 5
    found = results["hermetic"]
    assert found.status == Status.PASS and found.evidence.startswith("5 episodes in 2 fresh processes"), found
    assert found.evidence.endswith(f"({late} episodes were left out for lack of time)")
    assert results["leaks"].evidence.startswith("20 episodes in other orders")
    assert results["concurrency"].evidence.startswith("10 episodes on 8 threads")


def test_an_episode_of_one_process_alone_is_no_reference(monkeypatch):
    """It may differ in every process, so that a difference to it is no leak."""

    def changed(whole):
        return first(5)(whole) | {7: [*whole[7], {"observation": "another"}]}

    _, results = results_of(monkeypatch, changed, first(5))
    assert [result.status for result in results.values()] == [Status.PASS] * 3, results


def test_without_an_episode_nothing_is_shown(monkeypatch):
    _, results = results_of(monkeypatch, first(0), first(0))
    assert [result.status for result in results.values()] == [Status.SKIP] * 3, results
    assert (
        "no episode ended in every fresh process within 20 s; raise preflight.seconds" in results["hermetic"].evidence
    )
