"""The samplers of training rows."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.trainer.data.sampler import RowStream, Sampler, make_sampler

THIS = __name__
ROWS = [{"id": str(n), "level": n // 4} for n in range(12)]
STAGES = {"column": "level", "values": [[0], [0, 1], [2]], "groups": 3}


class Backwards(Sampler):
    """The rows from the last to the first."""

    def __init__(self, rows, seed, *, start=0):
        super().__init__(rows, seed)
        self.start = start

    def choose(self):
        return len(self.rows) - 1 - (self.start + self.drawn) % len(self.rows)


class Outside(Sampler):
    def choose(self):
        return len(self.rows)


class SetAsState(Backwards):
    def state(self):
        return {"seen": {1}}


def made(name="difficulty", rows=ROWS, seed=0, **parameters):
    return make_sampler(DataConfig(sampler=name, sampler_config=parameters), rows, seed)


def play(sampler, successes):
    """Draw a row for each success, and note the success. Return the ids."""
    drawn = []
    for success in successes:
        row = sampler.next()
        sampler.note(row, success)
        drawn.append(row["id"])
    return drawn


def ids(sampler, count):
    return [sampler.next()["id"] for _ in range(count)]


SUCCESSES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=60)
KINDS = st.sampled_from(
    [
        ("uniform", {}),
        ("difficulty", {"exploration": 0.3}),
        ("difficulty", {"exploration": 0, "forgetting": 1, "band": [0.5, 0.5]}),
        ("stages", STAGES),
        ("stages", {**STAGES, "max_rows": 5}),
        (f"{THIS}.Backwards", {"start": 2}),
    ]
)


@given(KINDS, SUCCESSES, SUCCESSES, st.integers(0, 3))
def test_a_sampler_continues_from_its_state(kind, before, after, seed):
    name, parameters = kind
    whole = made(name, seed=seed, **parameters)
    play(whole, before)
    drawn, state = whole.drawn, json.loads(json.dumps(stored := whole.state()))
    expected = play(whole, after)
    assert json.loads(json.dumps(stored)) == state  # later draws do not change a state that was taken before
    resumed = made(name, seed=seed, **parameters)
    resumed.drawn = drawn
    resumed.restore(state)
    assert play(resumed, after) == expected
    assert resumed.state() == whole.state() and resumed.metrics() == whole.metrics()


@given(SUCCESSES, st.integers(0, 3), st.sampled_from([{"band": [0, 1]}, {"exploration": 1}]))
def test_difficulty_that_leaves_out_nothing_is_uniform(successes, seed, parameters):
    assert play(made(seed=seed, **parameters), successes) == ids(RowStream(ROWS, seed), len(successes))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12), st.integers(0, 3))
def test_only_rows_inside_the_band_are_drawn_without_exploration(success_of, seed):
    sampler = made(seed=seed, exploration=0)
    for _ in ROWS:
        row = sampler.next()
        sampler.note(row, success_of[int(row["id"])])
    inside = {row["id"] for row in ROWS if success_of[int(row["id"])] == 0.5}
    drawn = ids(sampler, 24)
    assert set(drawn) == inside if inside else drawn
    assert sampler.metrics()["data/too_hard_frac"] == success_of.count(0.0) / 12
    assert sampler.metrics()["data/too_easy_frac"] == success_of.count(1.0) / 12


def test_forgetting_brings_a_row_back():
    def mean_after(forgetting):
        sampler = made(forgetting=forgetting)
        for success in (0.0, 0.0, 0.0, 1.0):
            sampler.note(ROWS[0], success)
        total, weight = sampler.results["0"]
        return total / weight

    assert mean_after(0) == 0.25
    assert mean_after(0.5) == pytest.approx(1 / 1.875)
    assert mean_after(1) == 1.0


def test_exploration_draws_rows_outside_of_the_band_at_its_rate():
    rows = [{"id": str(n)} for n in range(100)]
    sampler = made(rows=rows, exploration=0.2)
    for n, row in enumerate(rows):
        sampler.note(row, 0.5 if n < 50 else 0.0)
    drawn = [int(row_id) for row_id in ids(sampler, 6000)]
    assert sum(n >= 50 for n in drawn) / len(drawn) == pytest.approx(0.2 / 1.2, abs=0.02)


def test_a_stage_ends_by_success_or_by_rows():
    sampler = made("stages", **STAGES, success=1.0)
    assert {ROWS[int(n)]["level"] for n in play(sampler, [0.0, 1.0, 1.0, 1.0])} == {0}
    assert {ROWS[int(n)]["level"] for n in play(sampler, [0.0] * 16)} == {0, 1}
    assert sampler.metrics() == {"data/stage": 2.0}
    by_rows = made("stages", **STAGES, max_rows=4)
    assert [ROWS[int(n)]["level"] // 2 for n in ids(by_rows, 20)] == [0] * 8 + [1] * 12


def test_results_of_rows_of_another_stage_do_not_count():
    sampler = made("stages", **STAGES)
    for _ in range(9):
        sampler.note(ROWS[11], 1.0)
    assert {ROWS[int(n)]["level"] for n in ids(sampler, 8)} == {0}


def test_the_state_of_another_sampler_is_no_state():
    sampler = made()
    sampler.drawn = 5
    sampler.restore({})
    uniform = RowStream(ROWS, 0)
    uniform.drawn = 5
    assert ids(sampler, 12) == ids(uniform, 12)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("dificulty", {}, "data.sampler=dificulty is not known; choose one of uniform, difficulty, stages"),
        ("uniform", {"band": [0, 1]}, "does not fit data.sampler=uniform, which takes no settings"),
        ("difficulty", {"bend": [0, 1]}, "which takes band, forgetting, exploration: .*bend"),
        ("difficulty", {"band": [0.9, 0.1]}, r"data.sampler_config.band=\[0.9, 0.1\] must be two increasing numbers"),
        ("difficulty", {"band": 0.5}, "band=0.5 must be two increasing numbers"),
        ("difficulty", {"band": "ab"}, "band=ab must be two increasing numbers"),
        ("difficulty", {"forgetting": 2}, "data.sampler_config.forgetting=2 must be a number from 0 to 1"),
        ("difficulty", {"exploration": "much"}, "exploration=much must be a number from 0 to 1"),
        ("stages", {}, "missing a required .*argument: 'column'"),
        (
            "stages",
            {**STAGES, "column": "depth"},
            "column=depth is no column of the training rows; they have id, level",
        ),
        ("stages", {**STAGES, "values": [[0], [7]]}, r"no training row has a level of stage 2, \[7\]"),
        ("stages", {**STAGES, "values": [0, 1]}, r"values=\[0, 1\] must have one list for each stage"),
        ("stages", {**STAGES, "groups": 0}, "groups=0 must be an integer of at least 1"),
        ("stages", {**STAGES, "success": 80}, "success=80 must be a number from 0 to 1"),
        ("stages", {**STAGES, "max_rows": 1.5}, "max_rows=1.5 must be an integer of at least 1"),
        ("no.such", {}, "data.sampler=no.such cannot be imported"),
        ("random.Random", {}, "data.sampler=random.Random must be a subclass of mtrl.trainer.data.sampler.Sampler"),
        (f"{THIS}.SetAsState", {}, "gives no state as JSON: TypeError"),
    ],
)
def test_a_wrong_sampler_is_refused_in_one_sentence(name, parameters, message):
    with pytest.raises(UserError, match=message) as error:
        made(name, **parameters)
    assert "\n" not in str(error.value)


def test_a_choice_outside_of_the_rows_is_refused():
    with pytest.raises(UserError, match="Outside.choose returned 12; it must return the index of one of the 12"):
        made(f"{THIS}.Outside").next()


def test_a_wrong_sampler_ends_a_run_before_a_model_is_loaded(tmp_path, monkeypatch):
    from mtrl.command.compose import compose
    from mtrl.trainer.run import train
    from mtrl.trainer.setup import parts

    monkeypatch.setattr(parts, "set_up", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(UserError, match="data.sampler=random is not known"):
        train(compose(["debug=fast", "data.sampler=random", f"run_dir={tmp_path}/run", "preflight.at_start=none"]))


def test_the_uniform_order_is_that_of_earlier_versions():
    expected = list(range(12))
    random.Random("5/0").shuffle(expected)
    assert [int(n) for n in ids(made("uniform", seed=5), 12)] == expected
