"""The order of training rows."""

from hypothesis import given
from hypothesis import strategies as st

from mtrl.trainer.data.sampler import RowStream

ROWS = [{"id": str(i)} for i in range(7)]


@given(st.integers(0, 60), st.integers(0, 60))
def test_setting_drawn_resumes_the_order(before, after):
    stream = RowStream(ROWS, seed=3)
    drawn = [stream.next()["id"] for _ in range(before + after)]
    resumed = RowStream(ROWS, seed=3)
    resumed.drawn = before
    assert [resumed.next()["id"] for _ in range(after)] == drawn[before:]


def test_every_pass_has_every_row_once_in_a_new_order():
    stream = RowStream(ROWS, seed=0)
    passes = [[stream.next()["id"] for _ in ROWS] for _ in range(5)]
    assert all(sorted(p) == [r["id"] for r in ROWS] for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_seeds_differ():
    orders = {tuple(s.next()["id"] for _ in ROWS) for s in (RowStream(ROWS, seed) for seed in range(8))}
    assert len(orders) > 4
