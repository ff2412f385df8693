"""Hostile queries in the environment of text_to_sql: as a query and as the solution, with their cost."""

import json
import subprocess
import sys

import pytest
import sql_attacks
from attack_kit import MEGABYTE, ROOT, distinct, measured

from envs.text_to_sql import FAMILY, scorer
from mtrl.sandbox.sql import QueryLimits
from mtrl.types import FinishReason, Trajectory, Turn

SCRIPT = """
create table goods (fee integer, hue text, label text, qty integer);
insert into goods values (12, 'RED', 'CUP', 3), (40, 'BLUE', 'HAT', 1), (25, 'RED', 'BAG', 7), (25, 'RED', 'BAG', 9);
"""
TRUTH = {"sql": "select max(fee) from goods where hue = 'RED'", "script": SCRIPT}
LOOK = "<observation>fee | hue | label | qty\n12 | RED | CUP | 3\n"
OPERATIONS, SECONDS = 300_000, 5.0
MARGIN_SECONDS = 60.0
"""Additional time on a busy machine in seconds; this is a limit, not a measure of speed."""
MARGIN_BYTES = 48 * MEGABYTE
"""Bytes for the copies of a result in Python, and for the cache of a database."""
QUERIES = sql_attacks.queries()
FAMILIES = sorted({attack.family for attack in QUERIES})
REFUSED = {"files", "pragmas", "writes", "lookalikes"}


def make_environment():
    return FAMILY.environment(max_turns=3, query_operations=OPERATIONS, query_seconds=SECONDS)


def score(response):
    message = {"role": "assistant", "content": response}
    turns = [Turn([], [], [], [], FinishReason.STOP, response, message)]
    return FAMILY.score(Trajectory("row", "group", 0, turns), {"id": "row", "ground_truth": TRUTH})


@pytest.fixture(autouse=True)
def _low_limits_of_the_scorer(monkeypatch):
    monkeypatch.setattr(scorer, "LIMITS", QueryLimits(operations=OPERATIONS, seconds=SECONDS))


def check(turn, refused):
    """Run a hostile turn, then a query and the right answer in the same episode. Return the first observation."""
    environment = make_environment()
    try:
        first = environment.step(turn, TRUTH)
        assert not first.done and first.reward in (0.0, -0.1) and first.components["correct"] == 0.0
        observation = first.observation
        assert observation.startswith("<observation>") and observation.endswith("</observation>")
        assert (
            observation.count("<observation>") == observation.count("</observation>") == 1 and "<|" not in observation
        ), "the text of the result cannot end the observation"
        assert len(observation) < 6_200
        assert not refused or first.metrics["query_errors"] or first.metrics["malformed"], observation
        second = environment.step("<sql>select * from goods</sql>", TRUTH)
        assert second.observation.startswith(LOOK) and not second.done
        last = environment.step(f"<solution>{TRUTH['sql']}</solution>", TRUTH)
        assert last.done and last.reward == 1.0
    finally:
        environment.close()
    return observation


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_queries_are_wrong_and_cheap(family, outside):
    limit = QueryLimits()
    for attack in [attack for attack in QUERIES if attack.family == family]:
        text = outside.fill(attack.text)
        with measured() as usage:
            observation = check(f"<sql>{text}</sql>", attack.family in REFUSED)
            environment = make_environment()
            submitted = environment.step(f"<solution>{text}</solution>", TRUTH)
            environment.close()
        assert submitted.components["correct"] == 0.0 and submitted.reward <= 0.0, text[:200]
        assert score(f"<solution>{text}</solution>") == 0.0
        assert outside.secret not in observation
        assert usage.seconds < 2 * SECONDS + MARGIN_SECONDS, text[:200]
        assert usage.bytes < limit.result_bytes + limit.value_bytes * 256 + MARGIN_BYTES, text[:200]
    outside.check()


def test_turns_with_no_action_or_several_earn_no_reward(outside):
    attacks = sql_attacks.responses()
    for attack in attacks:
        for scheme in ("default", "skyrl"):
            environment = FAMILY.environment(max_turns=2, reward=scheme)
            with measured() as usage:
                first = environment.step(attack.text, TRUTH)
                assert first.reward <= 0.0 and (first.done or environment.step("<sql>select 1</sql>", TRUTH).done)
                assert score(attack.text) == 0.0
            environment.close()
            assert usage.seconds < MARGIN_SECONDS and usage.bytes < 64 * MEGABYTE, attack.text[:100]
    outside.check()
    assert distinct(attacks) == len(attacks) >= 20


CHILD = """
import json, resource, sys, threading
from mtrl.sandbox import sql
sql.HEAP_LIMIT = 96 * 2**20  # the limit cannot be raised again, so the test has its own process
good = ("select fee from goods order by fee", [(12,), (25,), (40,)])
make = lambda: sql.SqlSandbox.from_script("create table goods(fee); insert into goods values (40), (12), (25)")
bystander, wrong, over = make(), [], threading.Event()
def stand_by():
    while not over.wait(0.002):
        result = bystander.run(good[0])
        if result.rows != good[1]: wrong.append(result.error)
thread = threading.Thread(target=stand_by)
thread.start()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
errors = []
for attack in json.load(sys.stdin):
    sandbox = make()
    errors.append(sandbox.run(attack).error)
    if sandbox.run(good[0]).rows != good[1]: wrong.append(attack[:50])
    sandbox.close()
over.set(); thread.join()
print(json.dumps([errors, wrong, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


@pytest.mark.slow
@pytest.mark.ci
def test_the_memory_limit_stops_queries_that_compile_to_gigabytes(outside):
    """Most never reach their first instruction and would use over 5 GB. Concurrent queries stay right."""
    attacks = [*sql_attacks.nested_bombs(), *sql_attacks.swelling_aggregates()]
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([attack.text for attack in attacks]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    errors, wrong, kilobytes = json.loads(child.stdout)
    assert set(errors) <= {"the query takes too much memory", 'too many references to "goods": max 65535'}
    assert wrong == []
    assert kilobytes < (96 + 64) * 1024
    outside.check()
