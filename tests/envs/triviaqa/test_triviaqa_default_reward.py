"""The default reward of triviaqa: 1.0 for an episode with an accepted answer, else 0.0, independent of its searches. A
search is rewarded in advance in its own turn."""

import asyncio
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.triviaqa import FAMILY
from envs.triviaqa.demonstrator import search
from envs.triviaqa.reward import EpisodeReward, load_rewards
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.types import StopReason

CALL = '<reasoning>why</reasoning><tool>{"name": "wiki_search", "args": {"query": "France"}}</tool>'
RIGHT = "<reasoning>it says</reasoning><answer>Paris</answer>"
BROKEN_CALL = "<tool>no json</tool>"
TURN, OUTCOME = ["tool_execution", "search_hit"], ["exact_match", "settlement"]
EXECUTED, HIT = 0.2 / 2.6, 0.5 / 2.6
ROUNDING = 1e-12


def answering(answer):
    return f"<reasoning>it says</reasoning><answer>{answer}</answer>"


@pytest.fixture(scope="module")
def components_of(play, make_row, corpus):
    """The components of an episode, summed over its turns."""

    def total(responses, answers=("Paris",), **settings):
        results = play(make_row(list(answers)), responses, corpus=corpus, **{"max_turns": 5, **settings})
        return {name: sum(r.components[name] for r in results) for name in results[0].components}

    return total


def test_a_perfect_episode_turn_by_turn(play, make_row, corpus):
    first, last = play(make_row(["Paris"]), [CALL, RIGHT], corpus=corpus, max_turns=5)
    assert list(first.components) == [*TURN, *OUTCOME]
    assert list(first.components.values()) == pytest.approx([EXECUTED, HIT, 0.0, 0.0])
    assert list(last.components.values()) == pytest.approx([0.0, 0.0, 1.0, -EXECUTED - HIT])
    assert first.reward + last.reward == pytest.approx(1.0, abs=ROUNDING)


def test_the_turn_rewards_have_the_published_proportions(components_of):
    parts, published = components_of([CALL, RIGHT]), components_of([CALL, RIGHT], reward="original")
    assert {name: 2.6 * parts[name] for name in TURN} == pytest.approx({name: published[name] for name in TURN})


def test_without_a_search_only_the_answer_is_rewarded(components_of):
    assert components_of([RIGHT]) == {"tool_execution": 0.0, "search_hit": 0.0, "exact_match": 1.0, "settlement": 0.0}
    assert not any(components_of([answering("Rome")]).values())


def test_answers_with_several_candidates_earn_nothing(components_of):
    for answer in ("Rome", "Paris London Rome Berlin"):
        assert sum(components_of([CALL, answering(answer)]).values()) == pytest.approx(0.0, abs=ROUNDING)
    published = components_of([CALL, answering("Paris London Rome Berlin")], reward="aws")
    assert sum(published.values()) == pytest.approx(1.6), "what is closed here"


@pytest.mark.parametrize("glue", [" ", ", ", " or ", " and ", "/", "\n", " | ", ""])
@pytest.mark.parametrize("order", [0, 1])
def test_two_candidates_are_a_wrong_answer(components_of, glue, order):
    answer = glue.join(["Paris", "London"][:: 1 - 2 * order])
    assert components_of([CALL, answering(answer)])["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("answer", "answers", "accepted"),
    [
        ("paris", ["Paris"], True),
        ("  PARIS\n", ["Paris"], True),
        ("Paris", ["  paris "], True),
        ("It is Paris.", ["Paris"], False),
        ("the Beatles", ["Beatles", "The Fab Four"], False),
        ("the fab four", ["Beatles", "The Fab Four"], True),
        ("Parisian", ["Paris"], False),
        ("not Paris", ["Paris"], False),
        ("C++", ["C++"], True),
        ("the", ["The The"], False),
        ("1984", ["98"], False),
    ],
)
def test_accepted_answers(components_of, score, make_row, answer, answers, accepted):
    assert components_of([CALL, answering(answer)], answers)["exact_match"] == float(accepted)
    assert score([CALL, answering(answer)], make_row(answers)) == float(accepted), "the scorer reads the same"


def test_calls_without_an_answer_earn_nothing_in_the_end(components_of):
    for calls in ([CALL] * 5, [BROKEN_CALL] * 5, [search("Berlin"), CALL, search("France"), BROKEN_CALL, CALL]):
        assert sum(components_of(calls).values()) == pytest.approx(0.0, abs=ROUNDING)


def test_garbage_earns_nothing(components_of):
    for garbage in ("", "hello", "</reasoning></tool>", "<result>Paris</result>"):
        assert not any(components_of([garbage] * 5).values())
        assert sum(components_of([garbage] * 5, reward="original").values()) > 0.0, "a hole of the published format"


def test_a_hit_is_rewarded_in_its_own_turn(play, make_row, corpus):
    """In the published rewards only the first result counts, whatever the number of turns."""
    responses = [search("Berlin"), search("France"), search("France"), RIGHT]
    for scheme, hits in (("default", [0.0, HIT, 0.0, 0.0]), ("original", [0.0] * 4)):
        results = play(make_row(["Paris"]), responses, corpus=corpus, max_turns=5, reward=scheme)
        assert [r.components["search_hit"] for r in results] == pytest.approx(hits)


def test_advances_are_subtracted_in_the_last_turn_only(play, make_row, corpus):
    for last, outcome in ((RIGHT, 1.0), (answering("Rome"), 0.0), (CALL, 0.0), ("", 0.0)):
        *before, end = play(make_row(["Paris"]), [search("Berlin"), CALL, last], corpus=corpus, max_turns=3)
        assert not any(r.components[name] for r in before for name in OUTCOME)
        assert sum(r.reward for r in before) == pytest.approx(EXECUTED + HIT)
        assert end.done and end.components["exact_match"] == outcome
        advance = EXECUTED + HIT + sum(end.components[name] for name in TURN)
        assert end.components["settlement"] == pytest.approx(-advance)


def test_an_answer_that_is_part_of_a_word_is_not_found(components_of):
    assert components_of([search("Lincoln"), answering("it")], ["it"])["search_hit"] == 0.0
    assert components_of([search("Lincoln"), answering("it")], ["it"], reward="original")["search_hit"] == 0.5, (
        "in 'United'"
    )


@pytest.mark.parametrize("scheme", ["default", "original", "aws"])
def test_turn_rewards_add_up_to_the_function_of_the_whole(play, make_row, corpus, scheme):
    """The negative reward of a turn with an error is the decrease of the share of successful calls."""
    responses = [CALL, BROKEN_CALL, "what?", search("Berlin"), RIGHT]
    results = play(make_row(["Paris"]), responses, corpus=corpus, max_turns=6, reward=scheme)
    scale = 2.6 if scheme == "default" else 1.0
    shares = [0.2, 0.1, 0.1, 0.2 * 2 / 3, 0.2 * 2 / 3]
    steps = [now - before for now, before in zip(shares, [0.0, *shares], strict=False)]
    assert [scale * r.components["tool_execution"] for r in results] == pytest.approx(steps)
    assert all(r.reward == pytest.approx(sum(r.components.values())) for r in results)
    outcome = OUTCOME if scheme == "default" else ["exist_answer", "exact_match", "format", "xml"]
    assert not any(r.components[name] for r in results[:-1] for name in outcome)
    assert not any(results[-1].components[name] for name in TURN), "the last turn is the outcome's alone"


MOVES = st.one_of(
    st.sampled_from([CALL, search("Berlin"), search("Lincoln"), BROKEN_CALL, "<tool>{}</tool>", "", "hm"]),
    st.sampled_from(
        [RIGHT, answering("Rome"), answering("paris "), answering("the Paris"), f"{CALL}{RIGHT}", f"<think>{RIGHT}"]
    ),
    st.lists(
        st.sampled_from(
            ["<answer>", "</answer>", "<reasoning>", "</reasoning>", "<tool>", "</tool>", "</think>", "Paris", " ", "b"]
        ),
        max_size=8,
    ).map("".join),
)
EPISODES = st.lists(MOVES, min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(responses=EPISODES, more_turns=st.integers(0, 2))
@example(responses=[CALL, BROKEN_CALL, search("Berlin"), CALL, answering("Rome")], more_turns=0)
@example(responses=[BROKEN_CALL, CALL, CALL], more_turns=0)
@example(responses=[CALL, RIGHT], more_turns=2)
def test_an_episode_earns_one_for_an_accepted_answer_and_else_nothing(
    responses, more_turns, make_row, play, score, corpus
):
    """The sum is exact up to rounding, for all searches and all ends of an episode."""
    row = make_row(["Paris"])
    responses = [*responses, *["hm"] * more_turns]
    results = play(row, responses, corpus=corpus, max_turns=len(responses))
    assert results[-1].done and not any(result.done for result in results[:-1])
    success = score(responses[: len(results)], row)
    assert sum(result.reward for result in results) == pytest.approx(success, abs=ROUNDING)
    assert [result.components["exact_match"] for result in results] == [0.0] * (len(results) - 1) + [success]


@settings(max_examples=200, deadline=None)
@given(responses=EPISODES)
def test_earlier_turns_are_rewarded_only_for_their_results(responses, make_row, play, corpus):
    """The advance is that of the calls and results so far, so it never exceeds both, and no turn subtracts more."""
    results = play(make_row(["Paris"]), responses, corpus=corpus, max_turns=7)
    advance = hits = 0.0
    for result in results:
        if result.done:
            break
        advance += result.reward
        hits += result.components["search_hit"]
        assert -ROUNDING < advance < EXECUTED + HIT + ROUNDING
        assert hits == pytest.approx(0.0) or hits == pytest.approx(HIT)


@settings(max_examples=200, deadline=None)
@given(conversation=st.lists(st.tuples(MOVES, st.sampled_from([None, "<result>Paris</result>", "Error: no"]))))
def test_the_settlement_is_exact_for_any_observations(conversation):
    """For any observations, also impossible ones, the sum of an episode is that of its outcome."""
    reward = EpisodeReward(load_rewards("default"))
    total = 0.0
    for response, observation in conversation:
        parts = reward.components(response, observation, ["Paris", "the City of Light"], done=False)
        assert list(parts) == [*TURN, *OUTCOME] and parts["exact_match"] == parts["settlement"] == 0.0
        total += sum(parts.values())
    for answer, outcome in (("Paris", 1.0), ("Rome", 0.0)):
        ended = EpisodeReward(load_rewards("default"))
        ended.conversation, ended.granted = list(reward.conversation), dict(reward.granted)
        last = ended.components(f"<answer>{answer}</answer>", None, ["Paris", "the City of Light"], done=True)
        assert total + sum(last.values()) == pytest.approx(outcome, abs=ROUNDING)


def test_an_episode_that_the_context_limit_ends_earns_nothing_either(corpus, make_row, tiny_codec):
    """The environment does not process a turn that does not fit, and settles the turns before it."""
    pool = EnvironmentPool(1)
    engine = ScriptedEngine(lambda _, turn: [search("France"), "x" * 400, "never"][turn], tiny_codec.tokenizer)
    make = partial(FAMILY.environment, corpus=corpus, max_turns=3)
    limits = EpisodeLimits(max_turns=3, max_context_length=500, step_timeout=5, episode_timeout=20, retries=0)
    loop = EpisodeLoop(engine, make, partial(Conversation, tiny_codec), pool, limits)
    sampling = SamplingParams(max_generate_length=500, stop_token_ids=tiny_codec.stop_token_ids)
    trajectory = asyncio.run(loop.run(make_row(["Paris"]), "group", 0, sampling))
    pool.close()
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.trainable and len(trajectory.turns) == 2
    assert sum(turn.reward for turn in trajectory.turns) == pytest.approx(0.0, abs=ROUNDING)


def test_schemes_and_files():
    assert FAMILY.environment.reward_schemes == ("default", "original", "aws")
    with pytest.raises(UserError, match="reward.scheme=guide is not known to triviaqa; choose one of default, orig"):
        FAMILY.environment(reward="guide")
