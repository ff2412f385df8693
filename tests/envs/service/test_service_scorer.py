"""The scorer and the reward: worked cases, exploits, and their agreement on random agents."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.service import FAMILY
from envs.service.clerk import END, response
from envs.service.reward import judge
from envs.service.store import REASONS
from mtrl.errors import UserError
from tests.envs.episodes import trajectory_of
from tests.envs.service.cases import case_of, outcome, row_of, run

STOP = response([END])


def call(name, **arguments):
    return response([(name, {"order_id": "A100", **arguments})])


CANCEL, REFUND = call("cancel_order"), call("refund_order")
MOVE = call("change_address", address="12 Oak Street")
LOOK = call("get_order", postcode="4F7")
REFUSALS = [call("refuse_request", reason=reason) for reason in ("early", "late", "identity", "sent")]
EVERYTHING = [CANCEL, REFUND, MOVE, *REFUSALS]
ALL_CODES = " ".join(f"{letter}{number:03}" for letter in "RT" for number in range(200))


@pytest.mark.parametrize(
    ("case", "responses", "success"),
    [
        (case_of(), [CANCEL, "R111", STOP], 1.0),
        (case_of(), [CANCEL, "Order A100 is cancelled; the reference is R111.", STOP], 1.0),
        (case_of(), [CANCEL, CANCEL, "R111", STOP], 1.0),
        (case_of(), [CANCEL, STOP], 0.0),  # the reference is not told
        (case_of(), [CANCEL, "R111 or R222", STOP], 0.0),  # another code is told
        (case_of(), [CANCEL, "R1113", STOP], 0.0),  # no code
        (case_of(), ["R111", STOP], 0.0),  # nothing is done
        (case_of(), [CANCEL, "R111"], 0.0),  # not ended
        (case_of(), [CANCEL, "R111", STOP + CANCEL], 1.0),  # calls after the end are not made
        (case_of(), [LOOK * 7 + CANCEL, "R111", STOP], 1.0),
        (case_of(), [LOOK * 8 + CANCEL, "R111", STOP], 0.0),  # the ninth call of a turn is not made
        (case_of(), [CANCEL, REFUND, "R111", STOP], 0.0),
        (case_of(), [MOVE, CANCEL, "R111", STOP], 0.0),
        (case_of("cancel", "sent"), [call("refuse_request", reason="sent"), "T552", STOP], 1.0),
        (case_of("cancel", "sent"), [call("refuse_request", reason="late"), "T552", STOP], 0.0),
        (case_of("cancel", "sent"), [CANCEL, "T552", STOP], 0.0),
        (case_of("cancel", "sent"), [*REFUSALS, "T552", STOP], 0.0),  # the right reason after the wrong ones
        (case_of("cancel", "sent", known=False), [call("refuse_request", reason="identity"), STOP], 1.0),
        (case_of("cancel", "sent", known=False), ["T552", call("refuse_request", reason="identity"), STOP], 0.0),
        (case_of("address"), [MOVE, "R222", STOP], 1.0),
        (case_of("address"), [call("change_address", address="12 Oak street"), "R222", STOP], 0.0),
        (case_of("address"), [call("change_address", address="x"), MOVE, "R222", STOP], 1.0),  # corrected in time
    ],
)
def test_worked_cases(case, responses, success):
    assert outcome(row_of(case), responses) == (success, success)


@pytest.mark.parametrize(
    "case", [case_of(), case_of("refund"), case_of("refund", "delivered", "over"), case_of("address")]
)
@pytest.mark.parametrize(
    "responses",
    [
        [STOP],
        [*EVERYTHING, STOP],
        [*reversed(EVERYTHING), STOP],
        [f"{ALL_CODES} {ALL_CODES}", *EVERYTHING, STOP],
        [ALL_CODES[:1900], CANCEL, STOP],
        ["I am sorry, I cannot do that.", STOP],
    ],
    ids=["ends at once", "every change", "reversed", "every change and code", "every code", "only refuses"],
)
def test_exploits_earn_nothing(case, responses):
    assert outcome(row_of(case), responses, max_turns=20) == (0.0, 0.0)


def written(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


NAMES = ("cancel_order", "refund_order", "change_address", "refuse_request", "get_order", "end_conversation", "other")
VALUES = st.sampled_from(["A100", "B200", "4F7", "12 Oak Street", *REASONS, 5, None, True, ["A100"]])
ARGUMENTS = st.dictionaries(st.sampled_from(["order_id", "postcode", "address", "reason", "x"]), VALUES, max_size=3)
CALLS = st.one_of(
    st.builds(written, st.sampled_from(NAMES), ARGUMENTS),
    st.sampled_from([CANCEL, REFUND, MOVE, STOP, *EVERYTHING]),
    st.sampled_from(["<tool_call>", "</tool_call>", "<tool_call>{}</tool_call>", '<tool_call>{"name": 1}</tool_call>']),
)
SPEECH = st.sampled_from(["R111", "T552", "R222 A100", "sorry", "R111 <think> R999", "R999</think>R111", "xR111", ""])
RESPONSES = st.lists(st.one_of(SPEECH, st.lists(CALLS, min_size=1, max_size=10).map("".join)), max_size=6)
KINDS = st.sampled_from([case_of(), case_of("cancel", "sent"), case_of("address"), case_of("refund", known=False)])


@settings(max_examples=200, deadline=None)
@given(KINDS, RESPONSES, st.booleans())
def test_reward_and_scorer_agree_on_random_agents(case, responses, ends):
    row = row_of(case)
    responses = [*responses, STOP] if ends else responses
    results, trajectory = run(row, responses)
    reward = sum(result.reward for result in results)
    assert FAMILY.score(trajectory, row) == reward
    assert FAMILY.score(trajectory_of([turn.text for turn in trajectory.turns]), row) == reward


@settings(max_examples=150, deadline=None)
@given(KINDS, RESPONSES)
def test_random_agents_without_the_reference_action_earn_nothing(case, responses):
    name, arguments = case.reference_action()
    right = response([(name, arguments)])
    kept = [text for text in responses if json.loads(right[11:-12])["name"] not in text]
    assert outcome(row_of(case), [*kept, STOP]) == (0.0, 0.0)


def test_measures_name_the_part_that_is_missing():
    row = row_of(case_of())
    assert FAMILY.measure(trajectory_of([CANCEL, STOP]), row) == {"format": 1.0, "state": 1.0, "told": 0.0}
    assert FAMILY.measure(trajectory_of(["R111"]), row) == {"format": 0.0, "state": 0.0, "told": 1.0}


def test_a_ground_truth_without_a_key_is_refused():
    with pytest.raises(UserError, match="ground_truth lacks told"):
        judge({}, [], {"orders": {}, "tellable": []})
