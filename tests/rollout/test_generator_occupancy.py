"""For how long anybody was inside."""

from mtrl.rollout.occupancy import Occupancy


def test_seconds_in_which_anybody_was_inside():
    """Two that overlap count once, whoever is still inside counts, and what was taken is not taken again."""
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
