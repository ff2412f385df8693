"""Further measures of evaluations."""

import pytest

from envs.games import FAMILY
from tests.envs.episodes import trajectory_of


@pytest.mark.parametrize(
    ("responses", "form"),
    [
        (["<move>725</move>"], 1.0),
        (["<move>nonsense</move>", "hm"], 0.5),
        (["hm", "<move>1</move><move>2</move>", "<move>3</move>", "<move>4"], 0.25),
        ([], 0.0),
    ],
)
def test_format_is_the_share_of_messages_with_one_move(truths, make_row, responses, form):
    assert FAMILY.measure(trajectory_of(responses), make_row(truths["mastermind"])) == {"format": form}
