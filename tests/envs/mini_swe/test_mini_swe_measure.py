"""Further measures of evaluations."""

from envs.mini_swe import FAMILY
from tests.envs.episodes import trajectory_of


def measured(responses, row):
    return FAMILY.measure(trajectory_of(responses), row)


def test_format_and_submission(make_row, say, submit):
    row = make_row()
    assert measured([say("ls"), "hm", say("cat f.py"), say(submit)], row) == {"format": 0.75, "asks_to_submit": 1.0}
    assert measured([say("ls"), submit], row) == {"format": 0.5, "asks_to_submit": 0.0}
    assert measured([say("ls") + "\n" + say("ls")], row) == {"format": 0.0, "asks_to_submit": 0.0}
    assert measured([], row) == {"format": 0.0, "asks_to_submit": 0.0}
