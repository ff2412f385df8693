"""Rewards of search: an exhaustive search over all sequences of moves that the reward distinguishes."""

from itertools import product

import pytest

from envs.search import FAMILY
from envs.search.reward import SCHEMES
from mtrl.errors import UserError

pytestmark = pytest.mark.xdist_group("search_reward")  # one worker plays all sequences
MOVES = {
    "right": "<answer>tin</answer>",
    "wrong": "<answer>zinc</answer>",
    "hit": "<search>rome metal</search>",
    "other hit": "<search>tin</search>",
    "miss": "<search>mara works</search>",
    "nothing": "<search>zq</search>",
    "malformed": "tin",
    "stuffed": "<answer>tin</answer><answer>zinc</answer>",
}
"""One move of every kind that the reward distinguishes, and two that it must treat alike."""
TURNS = 4


@pytest.fixture(scope="module")
def earned(play, make_row, score):
    """scheme -> moves -> (return, score), for every sequence of moves up to the end of its episode."""
    found = {scheme: {} for scheme in SCHEMES}
    for scheme, names in product(SCHEMES, product(MOVES, repeat=TURNS)):
        if any(names[:turns] in found[scheme] for turns in range(1, TURNS)):
            continue  # an episode that has ended
        responses = [MOVES[name] for name in names]
        results = play(make_row(), responses, reward=scheme, max_turns=TURNS)
        value = sum(result.reward for result in results)
        found[scheme][names[: len(results)]] = value, score(responses[: len(results)], make_row())
    return found


def test_every_sequence_of_moves_is_covered(earned):
    searches = len(MOVES) - 2
    for scheme in SCHEMES:
        assert len(earned[scheme]) == 2 * (1 + searches + searches**2 + searches**3) + searches**4


def test_nothing_earns_more_than_the_score_by_default(earned):
    for names, (reward, scored) in earned["default"].items():
        assert reward <= scored, names
        clean = not {"malformed", "stuffed"} & set(names)
        assert reward == scored if clean else reward < scored, names


def test_stalling_earns_nothing_by_default(earned):
    for names, (reward, _) in earned["default"].items():
        if names[-1] == "right" and len(names) > 1:
            assert reward <= earned["default"]["right",][0], names


def test_progress_rewards_a_solved_episode_with_one_in_total(earned):
    malformed = {"malformed", "stuffed"}
    for names, (reward, scored) in earned["progress"].items():
        cost = 0.1 * sum(name in malformed for name in names)
        if scored:
            assert reward == pytest.approx(1.0 - cost), names
        else:
            found = 0.2 if {"hit", "other hit"} & set(names) else 0.0
            assert reward == pytest.approx(found - cost), names


def test_f1_rewards_single_words_as_the_default_does(earned):
    assert earned["f1"] == earned["default"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Denver Broncos", 1.0),
        ("the Denver Broncos!", 1.0),
        ("Broncos Denver", 1.0),
        ("Broncos", 2 / 3),
        ("Denver Broncos of Colorado", 2 / 3),
        ("Denver Denver", 0.5),
        ("Carolina Panthers", 1 / 3),
        ("Seattle Seahawks", 0.0),
        ("the", 0.0),
    ],
)
def test_f1_rewards_a_part_of_the_answer(play, make_row, answer, reward):
    row = make_row()
    row["ground_truth"] = {**row["ground_truth"], "target": ["Denver Broncos", "the Panthers of Colorado Springs"]}
    (result,) = play(row, [f"<answer>{answer}</answer>"], reward="f1")
    assert result.reward == pytest.approx(reward) and result.components["correct"] == result.reward


def test_mt_ppo_rewards_repeated_searches(earned):
    """The scheme is not the default, because its best policy repeats a successful search until the turns run out."""
    reward = earned["mt_ppo"]
    best = max(reward, key=lambda names: reward[names][0])
    assert set(best[:-1]) <= {"hit", "other hit"} and best[-1] == "right" and len(best) == TURNS
    assert reward[best][0] == pytest.approx(1.9)
    assert reward["hit", "right"][0] == pytest.approx(1.3) and reward["right",][0] == 1.0


def test_mt_ppo_can_reward_a_wrong_answer_more_than_a_right_one(earned):
    reward = earned["mt_ppo"]
    wrong, scored = reward["hit", "hit", "hit", "wrong"]
    assert scored == 0.0 and wrong == pytest.approx(1.1) and wrong > reward["right",][0]


def test_mt_ppo_by_hand(earned):
    reward = {names: value for names, (value, _) in earned["mt_ppo"].items()}
    assert reward["wrong",] == pytest.approx(0.2)
    assert reward["miss", "right"] == pytest.approx(0.0 + 1.0)
    assert reward["malformed", "right"] == pytest.approx(-0.2 + 1.0)
    assert reward["miss", "hit", "malformed", "miss"] == pytest.approx(0.0 + 0.3 - 0.2 - 1.0)


def test_components_and_their_sum(play, make_row):
    responses = [MOVES[name] for name in ("malformed", "hit", "hit", "right")]
    parts = {
        "default": [(0, -0.1), (0, 0), (0, 0), (1, 0)],
        "progress": [(0, -0.1, 0), (0, 0, 0.2), (0, 0, 0), (0.8, 0, 0)],
        "f1": [(0, -0.1), (0, 0), (0, 0), (1, 0)],
        "mt_ppo": [(0, -0.2, 0, 0), (0, 0.1, -0.1, 0.3), (0, 0.1, -0.1, 0.3), (1, 0, 0, 0)],
    }
    for scheme, expected in parts.items():
        results = play(make_row(), responses, reward=scheme)
        assert [tuple(result.components.values()) for result in results] == expected
        assert all(result.reward == sum(result.components.values()) for result in results)


def test_the_cost_of_malformed_turns_ends(play, make_row):
    results = play(make_row(), ["?"] * 12, max_turns=12)
    assert [result.reward for result in results] == [-0.1] * 5 + [0.0] * 7


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_right_answer_is_worth_one_in_whichever_turn(play, make_row, turns):
    results = play(make_row(), [MOVES["hit"]] * (turns - 1) + [MOVES["right"]])
    assert [result.reward for result in results] == [0.0] * (turns - 1) + [1.0]


def test_an_unknown_scheme():
    with pytest.raises(
        UserError, match="reward.scheme=skyrl is not known to search; choose one of default, progress, f1"
    ):
        FAMILY.environment(reward="skyrl")
    assert FAMILY.environment.reward_schemes == SCHEMES
