"""The six published rewards: computed numbers, their exploits, and a second implementation for comparison."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.triviaqa.reward import load_rewards

NAMES = ["tool_execution", "search_hit", "exist_answer", "exact_match", "format", "xml"]


def assistant(text):
    return {"role": "assistant", "content": text}


def user(text):
    return {"role": "user", "content": text}


SEARCH = assistant('<reasoning>why</reasoning><tool>{"name": "wiki_search", "args": {"query": "France"}}</tool>')
FOUND = user("<result>\nParis is the capital of France.\n</result>")
FAILED = user("<result>\nError: the tool call is not valid JSON\n</result>")
PERFECT = [SEARCH, FOUND, assistant("<reasoning>it says</reasoning><answer>paris </answer>")]


def values(scheme, conversation, answers=("Paris",)):
    """The value of each function for one conversation, by name."""
    functions = load_rewards(scheme)
    return {
        name: function(completions=[conversation], answer=[list(answers)])[0]
        for name, function in {**functions.turn, **functions.outcome}.items()
    }


@pytest.mark.parametrize("scheme", ["original", "aws"])
def test_a_perfect_two_turn_trajectory(scheme):
    assert list(values(scheme, PERFECT)) == NAMES
    assert list(values(scheme, PERFECT).values()) == pytest.approx([0.2, 0.5, 0.5, 1.0, 0.2, 0.2])
    assert sum(values(scheme, PERFECT).values()) == pytest.approx(2.6)


def test_answer_stuffing_earns_nine_tenths_of_the_outcome_of_aws():
    stuffed = [*PERFECT[:2], assistant("<reasoning>r</reasoning><answer>Paris London Rome Berlin</answer>")]
    values_of_aws = values("aws", stuffed)
    assert [values_of_aws[name] for name in NAMES[2:]] == pytest.approx([0.5, 0.0, 0.2, 0.2])
    assert sum(values_of_aws[name] for name in NAMES[2:]) == pytest.approx(0.9)


def test_the_format_of_aws_exceeds_its_cap_and_the_original_does_not():
    crowded = [assistant("<reasoning>r</reasoning><tool>{}</tool><answer>x</answer>")]
    assert values("aws", crowded)["format"] == pytest.approx(0.24)
    assert values("original", crowded)["format"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([SEARCH, FAILED, SEARCH, FOUND, PERFECT[2]], 0.1),
        ([SEARCH, FAILED, PERFECT[2]], 0.0),
        ([SEARCH, FOUND, SEARCH], 0.2),  # the second call has no reply
        ([assistant("no call"), FOUND], 0.0),
        ([], 0.0),
    ],
)
def test_tool_execution_is_the_share_of_calls_without_an_error(conversation, expected):
    assert values("original", conversation)["tool_execution"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ([SEARCH, user("<result>Berlin</result>"), SEARCH, FOUND], 0.0),  # the first result counts
        ([SEARCH, user("Error: no result at all"), SEARCH, FOUND], 0.5),
        ([SEARCH, user("<result>PARISIAN</result>")], 0.5),  # a part of a word is enough: one of the holes
        ([assistant("<reasoning>r</reasoning>"), FOUND], 0.0),
    ],
)
def test_search_hit_reads_the_first_result(conversation, expected):
    assert values("original", conversation)["search_hit"] == expected


@pytest.mark.parametrize(
    ("text", "original", "aws"),
    [
        ("hello", 0.2 * 0.2, 0.0),  # the original's check of spacing never fails
        ("", 0.2 * 0.2, 0.0),
        ("<reasoning>r</reasoning>", 0.2 * (0.2 + 0.2 + 0.2), 0.2 * (0.2 + 0.3)),
        ("<answer>x</answer>", 0.2 * (0.2 + 0.2 + 0.2), 0.2 * (0.2 + 0.3)),
        ("<answer></answer>", 0.2 * (0.2 + 0.2 + 0.2), 0.2 * 0.3),
        ("<reasoning>open <answer>x</answer>", 0.2 * (0.4 + 0.2 + 0.2 + 0.2), 0.2 * (0.2 + 0.3 + 0.3)),
    ],
)
def test_format_by_hand(text, original, aws):
    assert values("original", [assistant(text)])["format"] == pytest.approx(original)
    assert values("aws", [assistant(text)])["format"] == pytest.approx(aws)


def test_xml_by_hand():
    assert values("original", [assistant("<reasoning>r</reasoning><answer>x")])["xml"] == pytest.approx(0.2 * 3 / 4)
    assert values("original", [assistant("<tool>" * 9)])["xml"] == 0.0, "never below 0"
    assert values("original", [assistant("nothing")])["xml"] == 0.0


# The same from the published description, written anew with regular expressions; it shares no code with the family.

FIELDS = [["reasoning"], ["tool", "answer"]]
ALL = ["reasoning", "tool", "answer"]


def inner(tag, text):
    match = re.search(rf"<{tag}>\s*(.*?)\s*</{tag}>", text, re.DOTALL)
    return None if match is None else match.group(1).strip()


def again(conversation, answers, aws):
    texts = [m["content"] for m in conversation if m["role"] == "assistant"]
    attempts, good, first = 0, 0, None
    for index, message in enumerate(conversation[:-1]):
        after = conversation[index + 1]
        if message["role"] != "assistant" or inner("tool", message["content"]) is None or after["role"] != "user":
            continue
        attempts += 1
        result = inner("result", after["content"])
        result = None if aws and result == "" else result
        if result is not None and not result.startswith("Error:"):
            good += 1
        if first is None:
            first = result
    last = None
    for text in texts:
        last = inner("answer", text) if inner("answer", text) is not None else last
    formats, tidy = [], []
    for text in texts:
        present = [tag for tag in ALL if inner(tag, text) is not None]
        if aws:
            value = 0.4 * len([tag for tag in present if inner(tag, text)]) / 2
            value += 0.3 if text.strip().startswith("<reasoning>") else 0.0
            value += 0.3 if re.search(r"</(tool|answer)>\Z", text.strip()) else 0.0
        else:
            sets = [any(f"<{t}>" in text or f"</{t}>" in text for t in alternatives) for alternatives in FIELDS]
            value = (0.4 * (sets.count(True) / 2) if present else 0.0) + 0.2
            value += 0.2 if text.strip().startswith("<reasoning>") else 0.0
            value += 0.2 if re.search(r"</(tool|answer)>\Z", text.strip()) else 0.0
        formats.append(value)
        score, checks = 0, 0
        for tag in ALL:
            opened, closed = text.count(f"<{tag}>"), text.count(f"</{tag}>")
            if opened + closed:
                score += 2 - abs(opened - 1) - abs(closed - 1)
                checks += 2
        tidy.append(score / checks if checks else 0.0)
    lower = [a.lower() for a in answers]
    return {
        "tool_execution": 0.2 * (good / attempts) if attempts else 0.0,
        "search_hit": 0.5 if first is not None and any(a in first.lower() for a in lower) else 0.0,
        "exist_answer": 0.5 if last is not None and any(a in last.lower() for a in lower) else 0.0,
        "exact_match": 1.0 if last is not None and last.lower().strip() in [a.strip() for a in lower] else 0.0,
        "format": 0.2 * (sum(formats) / len(formats)) if formats else 0.0,
        "xml": max(0.0, 0.2 * (sum(tidy) / len(tidy))) if tidy else 0.0,
    }


PIECES = st.lists(
    st.sampled_from(
        [f"<{tag}>" for tag in [*ALL, "result"]]
        + [f"</{tag}>" for tag in [*ALL, "result"]]
        + ["paris", "Paris", "London", "Error:", " ", "\n", "{}", "<", "\x1f"]
    ),
    max_size=9,
).map("".join)
GOOD = st.sampled_from(
    ["<reasoning>r</reasoning><tool>{}</tool>", "<reasoning>r</reasoning><answer>PARIS</answer>", "<result>x</result>"]
)
CONVERSATIONS = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["assistant", "user"]), PIECES | GOOD
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(conversation=CONVERSATIONS, scheme=st.sampled_from(["original", "aws"]))
def test_another_implementation_gives_the_same_numbers_to_the_bit(conversation, scheme):
    assert values(scheme, conversation) == again(conversation, ["Paris", "the Seine "], scheme == "aws")


def test_hostile_messages_take_linear_time():
    start = time.process_time()
    for text in ("<tool>" * 150_000, f"<answer>{' ' * 1_000_000}", "</answer>" * 100_000):
        for scheme in ("original", "aws", "default"):
            values(scheme, [assistant(text), FOUND, assistant(text)])
    assert time.process_time() - start < 10, "work that grows faster than the response"
