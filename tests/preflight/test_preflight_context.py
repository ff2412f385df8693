"""The context: the input of every check."""

import os
import threading
from functools import cache
from types import SimpleNamespace

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.environments.factory import environment_factory
from mtrl.errors import UserError
from mtrl.preflight import checklist
from mtrl.preflight.context import CheckContext
from mtrl.preflight.result import Status, passed
from tests.preflight.broken.sound import Lookup, demonstrate, family, gold


class Meeting(Lookup):
    """Environment whose episodes continue only when two of them run at the same time."""

    barrier, here, most, lock = None, 0, 0, threading.Lock()

    def step(self, response, ground_truth):
        with Meeting.lock:
            Meeting.here += 1
            Meeting.most = max(Meeting.most, Meeting.here)
        try:
            if Meeting.barrier is not None:
                Meeting.barrier.wait(60.0)
            return super().step(response, ground_truth)
        finally:
            with Meeting.lock:
                Meeting.here -= 1


@cache
def composed(*overrides):
    return compose(overrides)


def context_of(family, max_rows=16):
    overrides = ["experiment=null", "environment.name=x", "environment.target=tests.preflight.broken.sound.FAMILY"]
    config = OmegaConf.to_object(composed(*overrides))
    splits = family.load(config.data, config.seed)
    return CheckContext(config, family, splits, environment_factory(config, family), max_rows=max_rows, seconds=20.0)


def test_rows_that_the_familys_players_refuse_are_left_out():
    """Generated rows have demonstrators, and loaded rows may have none, which is no fault of the environment."""

    def refusing(player):
        def play(row, *more):
            if int(row["ground_truth"]["answer"]) % 2:
                raise UserError("this row is unknown")
            return player(row, *more)

        return play

    known = family(Lookup, gold=refusing(gold), demonstrate=refusing(demonstrate))
    context = context_of(known)
    assert 0 < len(context.gold) < len(context.rows) and not any(episode.error for episode in context.gold)
    assert context.demonstrated and not any(episode.error for episode in context.demonstrated)
    assert checklist.CHECKS["gold"](context).status == Status.PASS
    assert checklist.CHECKS["robust"](context).status == Status.PASS

    def rejecting(row, *more):
        raise UserError("no row is known")

    context = context_of(family(Lookup, gold=rejecting, demonstrate=rejecting))
    assert "has no right answer to these rows" in checklist.CHECKS["gold"](context).evidence
    assert "the demonstrator rejects all of these rows" in checklist.CHECKS["spread"](context).evidence


def test_wrong_answers_are_those_of_the_row_also_if_gold_refuses_an_earlier_one():
    def gold_but_of_the_first(row):
        if row["id"] == "train-0":
            raise UserError("this row is unknown")
        return gold(row)

    context = context_of(family(Lookup, gold=gold_but_of_the_first, demonstrate=demonstrate))
    for row in context.rows[1:4]:
        right = f"<final_output>{row['ground_truth']['answer']}</final_output>"
        answers = context.wrong_answers(row)
        assert len(answers) == 2 and right not in answers
        assert answers[0] in context.wrong[row["id"]]
    assert context.rows[0]["id"] == "train-0" and context.wrong_answers(context.rows[0])


def test_tasks_that_wait_for_processes_run_in_parallel(monkeypatch):
    """There are as many threads as cores, 2 here: each step of 16 episodes waits for a step of another episode."""
    monkeypatch.setattr("mtrl.preflight.context.usable_cores", lambda: 2)
    for waits in (True, False):
        monkeypatch.setattr(Meeting, "barrier", threading.Barrier(2) if waits else None)
        monkeypatch.setattr(Meeting, "most", 0)
        context = context_of(family(Meeting, waits_for_processes=waits))
        assert len(context.gold) == 16 and [e.error for e in context.gold] == [None] * 16
        assert Meeting.most == (2 if waits else 1)
        assert [episode.row["id"] for episode in context.gold] == [row["id"] for row in context.rows]


def test_players_that_would_end_the_process_fail_their_check_alone():
    """A run also calls `gold`, `decoys` and `demonstrate` at its start."""

    def exits(row, *more):
        os._exit(0)

    for player in ("gold", "decoys", "demonstrate"):
        context = context_of(family(Lookup, **{player: exits}), max_rows=2)
        results = list(checklist.run(context, [("agreement", checklist.CHECKS["agreement"]), ("splits", passes)]))
        assert [result.status for result in results] == [Status.FAIL, Status.PASS]
        assert "the check itself failed: RuntimeError: SystemExit('os._exit(0)" in results[0].evidence


def test_a_mistake_in_a_player_is_reported_by_one_check():
    """The checks of gold and the demonstrator would otherwise all repeat it."""

    def absent(row, *more):
        return row["no_such"]

    names = ["turns", "gold", "spread", "agreement"]
    for player, reporting in (("gold", "turns"), ("demonstrate", "spread")):
        context = context_of(family(Lookup, **{player: absent}), max_rows=2)
        results = {r.name: r for r in checklist.run(context, [(name, checklist.CHECKS[name]) for name in names])}
        found = results[reporting]
        assert found.status == Status.FAIL and found.fix == f"fix {player}"
        assert (
            f"{player} of Lookup failed on row train-0: KeyError in test_preflight_context.py, line" in found.evidence
        )
        assert [result.name for result in results.values() if result.status == Status.FAIL] == [reporting]
        assert results["agreement"].evidence == f"a player failed; see {reporting}"


def test_a_demonstrator_without_a_further_response_is_no_fault_of_the_environment():
    """Its episodes end there and count with their reward, so that the check of the spread sees its failures."""

    def ends_early(row, rng):
        moves = iter(gold(row) if rng.random() < 0.5 else ["wrong"])
        return SimpleNamespace(act=lambda observation: next(moves))

    context = context_of(family(Lookup, demonstrate=ends_early))
    result = checklist.CHECKS["robust"](context)
    assert result.status == Status.FAIL and "has no more responses after 1 turns" in result.evidence
    assert result.fix.startswith("repeat its last response")
    assert checklist.CHECKS["spread"](context).status == Status.PASS


def passes(context):
    return passed("")


def test_scores_are_judged_with_the_tolerance_of_training():
    judge = SimpleNamespace(config=composed())
    scores = {1.0: True, sum([0.1] * 10): True, 1 - 1e-7: False}
    assert {score: CheckContext.succeeds(judge, SimpleNamespace(score=score)) for score in scores} == scores
