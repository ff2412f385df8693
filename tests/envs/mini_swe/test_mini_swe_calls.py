"""Options of hidden calls: generators, tolerances and slow cases, by the reward and by the scorer."""

import json

import pytest
from omegaconf import OmegaConf

from envs.mini_swe import FAMILY
from envs.mini_swe.calls import Call, check_calls
from mtrl.command.compose import compose
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.preflight.__main__ import check

COUNT = "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1\n"
WAIT = "import time\ndef f(): time.sleep(1.2)\n"


def repaired(judged, make_row, say, submit, code, *calls):
    """Reward and score of an episode that writes `code` into the file."""
    row = make_row(files={"m.py": "f = None\n"}, calls=list(calls))
    return judged(row, [say(f"cat > m.py <<'END'\n{code}END\n{submit}")])


@pytest.mark.parametrize(
    ("code", "expected", "options", "right"),
    [
        (COUNT, [0, 1, 2], {"items": 3}, 1.0),
        (COUNT, [0, 1, 3], {"items": 3}, 0.0),
        (COUNT, [0, 1, 2], {"items": 4}, 0.0),
        (COUNT, [0, 1, 2], None, 0.0),
        ("def f(): return iter('ab')\n", ["a", "b"], {"items": 9}, 1.0),
        ("def f(): return 5\n", [5], {"items": 9}, 0.0),
        ("def f(): return 0.1 + 0.2\n", 0.3, {"tolerance": 1e-9}, 1.0),
        ("def f(): return 0.1 + 0.2\n", 0.3, None, 0.0),
        ("def f(): return 0.31\n", 0.3, {"tolerance": 1e-3}, 0.0),
        ("def f(): return 1000.5\n", 1000.0, {"tolerance": 1e-3}, 1.0),
        ("def f(): return 3\n", 3.0, {"tolerance": 1e-3}, 1.0),
        ("def f(): return True\n", 1.0, {"tolerance": 1e-3}, 0.0),
        ("def f(): return 4\n", 3, {"tolerance": 1.0}, 0.0),
        ("def f(): return float('nan')\n", 1.0, {"tolerance": 9.0}, 0.0),
        ("def f(): return float('inf')\n", 1.0, {"tolerance": 9.0}, 0.0),
        ("def f(): return 10 ** 400\n", 1.0, {"tolerance": 9.0}, 0.0),
        ("def f(): return [{'a': (0.5, 'x')}]\n", [{"a": [0.51, "x"]}], {"tolerance": 0.1}, 1.0),
        ("def f(): return [{'a': (0.5, 'y')}]\n", [{"a": [0.51, "x"]}], {"tolerance": 0.1}, 0.0),
        ("def f(): return [0.5]\n", [0.5, 0.5], {"tolerance": 0.1}, 0.0),
        ("def f(): return (x / 4 for x in (1, 2))\n", [0.3, 0.5], {"items": 3, "tolerance": 0.1}, 1.0),
        ("def f(): return 1\n", 1, {"seconds": 4}, 1.0),
        (WAIT, None, {"seconds": 1}, 0.0),
        (WAIT, None, None, 1.0),
    ],
)
def test_the_options_of_a_call(judged, make_row, say, submit, code, expected, options, right):
    call = ["m.f", [], expected, *([options] if options else [])]
    assert repaired(judged, make_row, say, submit, code, call) == (right, right)


def test_a_long_result_is_compared_whole(judged, make_row, say, submit):
    numbers = list(range(50_000))
    for expected, right in ((numbers, 1.0), ([*numbers[:-1], 0], 0.0)):
        call = ["m.f", [], expected, {"items": len(numbers)}]
        assert repaired(judged, make_row, say, submit, COUNT, call) == (right, right)


def test_any_failing_call_fails_the_episode(judged, make_row, say, submit):
    plain, alone = ["m.f", [], 1], ["m.f", [], 1, {"seconds": 4}]
    code = "def f(): return 1\n"
    assert repaired(judged, make_row, say, submit, code, plain, alone) == (1.0, 1.0)
    for wrong in (["m.f", [], 2], ["m.f", [], 2, {"seconds": 4}], ["m.f", [], 2, {"tolerance": 0.5}]):
        assert repaired(judged, make_row, say, submit, code, plain, wrong, alone) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"item": 3},
            "row 7, call m.f: {'item': 3} are no options of a call; write {items, tolerance",
        ),
        ({}, "are no options of a call"),
        (3, "are no options of a call"),
        ({"items": 0}, "row 7, call m.f: items=0 must be a positive number"),
        ({"items": 1.5}, "items=1.5 must be a positive number"),
        ({"items": True}, "items=True must be a positive number"),
        ({"items": 10**6}, "items=1000000 must be at most 100000"),
        ({"tolerance": "1e-6"}, "tolerance='1e-6' must be a positive number"),
        ({"seconds": float("inf")}, "seconds=inf must be a positive number"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UserError) as refused:
        check_calls([["m.f", [], 1, options]], "7")
    assert message in str(refused.value)


def test_a_call_without_options_has_none():
    assert Call.of(["m.f", [1], 2]) == Call("m.f", [1], 2, items=None, tolerance=None, seconds=None)


def write_rows(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row_of(code, number, *calls):
    patch = f"--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-f = None\n+{code}"
    return {"issue": f"f({number}) fails", "files": {"m.py": "f = None\n"}, "calls": list(calls), "patch": patch}


def test_a_call_may_not_take_longer_than_all(tmp_path):
    rows = [row_of("f = abs", n, ["m.f", [-n], n, {"seconds": 31}]) for n in range(8)]
    data = DataConfig(path=str(write_rows(tmp_path, *rows)))
    with pytest.raises(UserError, match=r"has a call with seconds=31, and environment.config.grading_seconds=30 is"):
        FAMILY.load(data, seed=0)
    assert FAMILY.load(data, seed=0, grading_seconds=31).train


def test_gold_that_fails_names_its_call(tmp_path):
    rows = [row_of("f = abs", n, ["m.f", [-n], n + (n == 3)]) for n in range(4)]
    overrides = [
        "experiment=mini_swe",
        f"data.path={write_rows(tmp_path, *rows)}",
        "preflight.model=false",
        "preflight.processes=0",
    ]
    results = check(OmegaConf.to_object(compose([*overrides, "preflight.rows=4"])))
    gold = next(result for result in results if result.name == "gold")
    assert "gold fails on 1. " in gold.evidence
    assert "the score is 0 (m.f(-3) gives 3; 4 is expected)" in gold.evidence
