"""The default reward: the holes of the published one are closed, and it never exceeds what the strict scorer says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.triviaqa import FAMILY
from envs.triviaqa.demonstrator import search
from envs.triviaqa.reward import EpisodeReward, load_rewards
from mtrl.errors import UserError

CALL = '<reasoning>why</reasoning><tool>{"name": "wiki_search", "args": {"query": "France"}}</tool>'
RIGHT = "<reasoning>it says</reasoning><answer>Paris</answer>"
TURN, OUTCOME = ["tool_execution", "search_hit"], ["exist_answer", "exact_match", "format", "xml"]


def said(answer):
    return f"<reasoning>it says</reasoning><answer>{answer}</answer>"


@pytest.fixture(scope="module")
def paid(play, make_row, corpus):
    """The components of an episode, summed over its turns."""

    def total(responses, answers=("Paris",), **settings):
        results = play(make_row(list(answers)), responses, corpus=corpus, **{"max_turns": 5, **settings})
        return {name: sum(r.components[name] for r in results) for name in results[0].components}

    return total


def test_a_perfect_episode_is_worth_one_in_the_published_proportions(paid):
    parts = paid([CALL, RIGHT])
    published = paid([CALL, RIGHT], reward="original")
    assert list(parts) == [*TURN, *OUTCOME] == list(published)
    assert [published[name] for name in parts] == pytest.approx([0.2, 0.5, 0.5, 1.0, 0.2, 0.2])
    assert {name: 2.6 * value for name, value in parts.items()} == pytest.approx(published)
    assert sum(parts.values()) == pytest.approx(1.0) and sum(published.values()) == pytest.approx(2.6)


def test_stuffing_earns_less_than_an_honest_wrong_answer(paid):
    wrong = sum(paid([CALL, said("Rome")]).values())
    stuffed = sum(paid([CALL, said("Paris London Rome Berlin")]).values())
    assert stuffed == pytest.approx(0.7 / 2.6) and wrong == pytest.approx(1.1 / 2.6)
    published = paid([CALL, said("Paris London Rome Berlin")], reward="aws")
    assert sum(published[name] for name in OUTCOME) == pytest.approx(0.9), "what is closed here"


@pytest.mark.parametrize("glue", [" ", ", ", " or ", " and ", "/", "\n", " | ", ""])
@pytest.mark.parametrize("order", [0, 1])
def test_two_candidates_are_a_wrong_answer(paid, glue, order):
    answer = glue.join(["Paris", "London"][:: 1 - 2 * order])
    assert paid([CALL, said(answer)])["exist_answer"] == paid([CALL, said(answer)])["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("answer", "answers", "exists", "exact"),
    [
        ("paris", ["Paris"], True, True),
        ("  PARIS\n", ["Paris"], True, True),
        ("It is Paris.", ["Paris"], True, False),
        ("the Beatles", ["Beatles", "The Fab Four"], True, False),
        ("the fab four", ["Beatles", "The Fab Four"], True, True),
        ("Parisian", ["Paris"], False, False),
        ("Paris London", ["Paris", "London town"], False, False),
        ("not Paris", ["Paris"], False, False),
        ("C++", ["C++"], True, True),
        ("?", ["C++", "?!"], False, False),
        ("the", ["The The"], False, False),
        ("1984", ["98"], False, False),
    ],
)
def test_what_counts_as_an_accepted_answer(paid, answer, answers, exists, exact):
    parts = paid([CALL, said(answer)], answers)
    assert (parts["exist_answer"] > 0, parts["exact_match"] > 0) == (exists, exact)


@pytest.mark.parametrize(("answer", "earns"), [("one two three", True), ("one two three four", False)])
def test_an_answer_is_short_or_earns_no_outcome(paid, answer, earns):
    parts = paid([CALL, said(answer)])
    assert {name: parts[name] > 0 for name in OUTCOME} == {
        "exist_answer": False, "exact_match": False, "format": earns, "xml": earns
    }  # fmt: skip


def test_format_never_exceeds_its_cap(paid):
    crowded = "<reasoning>r</reasoning><tool>{}</tool><answer>Paris</answer>"
    assert paid([crowded], max_turns=1, reward="aws")["format"] == pytest.approx(0.24)
    assert paid([crowded], max_turns=1)["format"] == 0.0
    assert paid([CALL, RIGHT])["format"] == pytest.approx(0.2 / 2.6)


def test_garbage_earns_nothing(paid):
    for garbage in ("", "hello", "</reasoning></tool>", "<result>Paris</result>"):
        assert sum(paid([garbage] * 5).values()) == 0.0
        assert sum(paid([garbage] * 5, reward="original").values()) > 0.0, "a hole of the published format"


def test_calls_without_an_answer_earn_the_turn_rewards_only(paid):
    parts = paid([CALL] * 5)
    assert sum(parts.values()) == pytest.approx(0.7 / 2.6) and not any(parts[name] for name in OUTCOME)


def test_a_later_search_that_finds_the_answer_is_paid_where_it_happens(play, make_row, corpus):
    """Published, only the first result counts, whatever the number of turns."""
    responses = [search("Berlin"), search("France"), search("France"), RIGHT]
    for scheme, hits in (("default", [0.0, 0.5 / 2.6, 0.0, 0.0]), ("original", [0.0] * 4)):
        results = play(make_row(["Paris"]), responses, corpus=corpus, max_turns=5, reward=scheme)
        assert [r.components["search_hit"] for r in results] == pytest.approx(hits)


def test_an_answer_that_is_part_of_a_word_is_not_found(paid):
    assert paid([search("Lincoln"), said("it")], ["it"])["search_hit"] == 0.0
    assert paid([search("Lincoln"), said("it")], ["it"], reward="original")["search_hit"] == 0.5, "in 'United'"


@pytest.mark.parametrize("scheme", ["default", "original", "aws"])
def test_turn_rewards_add_up_to_the_function_of_the_whole(play, make_row, corpus, scheme):
    """A turn that fails pays back what the share of good calls loses by it."""
    responses = [CALL, "<tool>no json</tool>", "what?", search("Berlin"), RIGHT]
    results = play(make_row(["Paris"]), responses, corpus=corpus, max_turns=6, reward=scheme)
    scale = 2.6 if scheme == "default" else 1.0
    shares = [0.2, 0.1, 0.1, 0.2 * 2 / 3, 0.2 * 2 / 3]
    steps = [now - before for now, before in zip(shares, [0.0, *shares], strict=False)]
    assert [scale * r.components["tool_execution"] for r in results] == pytest.approx(steps)
    assert all(r.reward == pytest.approx(sum(r.components.values())) for r in results)
    assert not any(r.components[name] for r in results[:-1] for name in OUTCOME)
    assert not any(results[-1].components[name] for name in TURN), "the last turn is the outcome's alone"


ACTIONS = st.one_of(
    st.sampled_from([CALL, RIGHT, said("Rome"), said("the Paris"), "", "<tool>{}</tool>", f"{CALL}{RIGHT}"]),
    st.lists(
        st.sampled_from(
            ["<answer>", "</answer>", "<reasoning>", "</reasoning>", "<tool>", "</tool>", "</think>", "Paris", " ", "b"]
        ),
        max_size=8,
    ).map("".join),
)


@settings(max_examples=300, deadline=None)
@given(responses=st.lists(ACTIONS, min_size=1, max_size=4))
def test_the_reward_never_says_solved_where_the_scorer_does_not(responses, make_row, play, score, corpus):
    row = make_row(["Paris"])
    results = play(row, responses, corpus=corpus, max_turns=4)
    success = score(responses[: len(results)], row)
    total = sum(result.reward for result in results)
    matched = sum(result.components["exact_match"] for result in results)
    assert -1e-9 < total < 1 + 1e-9
    assert (matched > 0) == (success == 1.0), "exact_match and the scorer read the same"
    assert success == 1.0 or total <= 1.6 / 2.6 + 1e-9


@settings(max_examples=200, deadline=None)
@given(conversation=st.lists(st.tuples(ACTIONS, st.sampled_from([None, "<result>Paris</result>", "Error: no"]))))
def test_components_stay_within_their_published_caps(conversation):
    reward = EpisodeReward(load_rewards("default"))
    caps = dict(zip([*TURN, *OUTCOME], [0.2, 0.5, 0.5, 1.0, 0.2, 0.2], strict=True))
    total = dict.fromkeys(caps, 0.0)
    for response, observation in conversation:
        for name, value in reward.pay(response, observation, ["Paris", "the City of Light"], done=False).items():
            total[name] += value
            assert -1e-9 <= total[name] <= caps[name] / 2.6 + 1e-9
    for name, value in reward.pay("<answer>Paris</answer>", None, ["Paris"], done=True).items():
        assert total[name] + value <= caps[name] / 2.6 + 1e-9


def test_schemes_and_files():
    assert FAMILY.environment.reward_schemes == ("default", "original", "aws")
    with pytest.raises(UserError, match="reward.scheme=guide is not known to triviaqa; choose one of default, orig"):
        FAMILY.environment(reward="guide")
