"""The time in which at least one activity is in progress."""

from mtrl.rollout.episode import Occupancy


def test_overlapping_activities_count_once():
    """Overlapping intervals count once, an open interval counts, and `take` returns every second once."""
    now = 0.0
    occupancy = Occupancy(lambda: now)
    assert occupancy.seconds == 0
    now = 5.0
    with occupancy:
        now = 7.0
        with occupancy:
            now = 8.0
        assert occupancy.seconds == 3
        now = 10.0
        assert occupancy.take() == 5
    now = 20.0
    assert (occupancy.seconds, occupancy.take()) == (5, 0)
    with occupancy:
        now = 21.0
    assert (occupancy.seconds, occupancy.take()) == (6, 1)
