"""SQuAD's exact match: cases computed by hand, and a comparison of both implementations."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.search.exact_match import f1, is_match, normalise, occurs
from envs.search.scorer import reduced

CASES = {
    "The Denver Broncos": "denver broncos",
    "  an  apple\ta day\n": "apple day",
    "O'Brien, Jr.": "obrien jr",
    "24-10": "2410",
    "U.S.A.": "usa",
    "$1,000": "1000",
    "a.m.": "am",
    "Theatre": "theatre",
    "the-end": "theend",
    "t.h.e end": "end",
    "The “New” York": "“new” york",
    "Ana and the an": "ana and",
    "Bad__an_": "badan",
    "L'été à Łódź": "lété à łódź",
    "a\xa0the b": "b",
    "½ of the cake": "½ of cake",
    "the½": "the½",
    "A": "a",
    "The The": "the the",
    "?!": "?!",
}


@pytest.mark.parametrize(("text", "normal"), CASES.items())
def test_by_hand(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "aliases", "right"),
    [
        ("the Vistula.", ["Vistula River", "Vistula"], True),
        ("Vistula", ["Vistula River"], False),
        ("Vistula River", ["Vistula"], False),
        ("2410", ["24-10"], True),
        ("the", ["a"], False),
        ("...", ["the"], False),
        ("the the", ["The The"], True),
        ("", ["?"], False),
        ("Vistula", [], False),
    ],
)
def test_matches(answer, aliases, right):
    assert is_match(answer, aliases) is right


def squad_f1(prediction, truth):
    """F1 as evaluate-v1.1.py of SQuAD computes it."""
    predicted, expected = normalise(prediction).split(), normalise(truth).split()
    same = sum(min(predicted.count(word), expected.count(word)) for word in set(predicted))
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(st.sampled_from(["tin", "Rome", "the", "of", "?", "ten"]), max_size=6).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(answer=WORDS, aliases=st.lists(WORDS, max_size=3))
def test_f1_is_that_of_squad(answer, aliases):
    assert f1(answer, aliases) == pytest.approx(max((squad_f1(answer, alias) for alias in aliases), default=0.0))
    assert f1(answer, aliases) == 1.0 or not is_match(answer, aliases)


def test_occurs_as_whole_words():
    assert occurs(["The Vistula"], "It stands on the Vistula, a river.")
    assert not occurs(["tin"], "A nation of routine.")
    assert not occurs(["?!"], "What?!") and not occurs(["the"], "The end of the road.")


PIECES = ["The", "a", "an", " ", "  ", "\t", "\n", ".", "-", "_", "'", "“", "é", "ß", "İ", "½", "٣", "\xa0", "\u2003"]
PIECES += ["tin", "theatre", "24", "the", "A", "\u0301", "\u200b", "東京", "🌍", "\0", "\ud800", "²", "ǅ"]


@settings(max_examples=800, deadline=None)
@given(text=st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.text(max_size=30)))
@example("the\u0301")
@example("a²")
def test_the_scorer_reduces_answers_to_the_same_words(text):
    """The scorer normalises in another way; its words of two texts are equal exactly if `normalise` of both is."""
    words = reduced(text)
    normal = normalise(text)
    assert (words[1] if words[0] == "nothing but" else " ".join(words)) == normal


@settings(max_examples=500, deadline=None)
@given(pair=st.tuples(*[st.lists(st.sampled_from(PIECES), max_size=5).map("".join)] * 2))
def test_reward_and_scorer_agree_on_any_text(pair):
    answer, alias = pair
    if answer.strip():
        assert is_match(answer, [alias]) == (reduced(answer) == reduced(alias))
