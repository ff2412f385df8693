"""Episodes of the service desk: what is said, what is called, and how an episode ends."""

import pytest

from envs.service import FAMILY
from envs.service.clerk import END, response
from mtrl.errors import UserError
from tests.envs.service.cases import case_of, outcome, row_of, run

ASK = "What are your order number and your postcode?"
LOOK = response([("get_order", {"order_id": "A100", "postcode": "4F7"})])
CANCEL = response([("cancel_order", {"order_id": "A100"})])
STOP = response([END])


def texts(result):
    observation = result.observation
    return observation if isinstance(observation, str) else [message["content"] for message in observation]


def test_speech_reaches_the_customer_and_calls_reach_the_shop():
    row = row_of(case_of())
    results, _ = run(row, [ASK, LOOK, "Shall I cancel the order?", CANCEL, "Done: R111.", STOP])
    assert [texts(result) for result in results] == [
        "My order number is A100. My postcode is 4F7.",
        ['{"identity": "confirmed", "item": "kettle", "status": "packing", "returns": "open", "parcel": "none"}'],
        "Yes, please.",
        ['{"reference": "R111"}'],
        "Thank you, goodbye.",
        ["The conversation has ended."],
    ]
    assert [result.reward for result in results] == [0.0] * 5 + [1.0]
    last = results[-1].metrics
    assert (last["state"], last["told"], last["tool/end_conversation/calls"]) == (1.0, 1.0, 1.0)


def test_a_wrong_postcode_shows_nothing_of_the_order():
    row = row_of(case_of(known=False))
    results, _ = run(row, [response([("get_order", {"order_id": "A100", "postcode": "9W9"})])])
    assert texts(results[0]) == ['{"identity": "wrong"}']


def test_an_unknown_order_is_an_error_of_the_tool():
    results, _ = run(row_of(case_of()), [response([("cancel_order", {"order_id": "A999"})])])
    assert texts(results[0]) == ["Error: there is no order with this number"]


def test_thoughts_are_not_said():
    row = row_of(case_of())
    results, _ = run(row, ["<think>my postcode trick</think>What is your order number?", "<think>your postcode"])
    assert [texts(result) for result in results] == [
        "My order number is A100.",
        "I do not understand. I would like to cancel the kettle that I ordered.",
    ]


def test_text_beside_a_call_is_not_said():
    responses = [CANCEL, f"The reference is R111.{LOOK}", STOP]
    assert outcome(row_of(case_of()), responses) == (0.0, 0.0)
    assert outcome(row_of(case_of()), [CANCEL, "The reference is R111.", STOP]) == (1.0, 1.0)


def test_an_episode_without_an_end_has_no_reward():
    results, trajectory = run(row_of(case_of()), [CANCEL, "The reference is R111.", "Bye."], max_turns=3)
    assert (results[-1].done, results[-1].truncated, results[-1].reward) == (True, True, 0.0)
    assert FAMILY.score(trajectory, row_of(case_of())) == 0.0


def test_an_episode_does_not_change_its_row():
    row = row_of(case_of())
    before = repr(row)
    run(row, [CANCEL, STOP])
    assert repr(row) == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"customer": "human"}, "environment.config.customer=human is not known; choose one of scripted, endpoint"),
        (
            {"endpoint": {"url": "http://x/v1"}},
            "environment.config.endpoint has no effect with environment.config.cust",
        ),
        ({"max_turns": 1}, "generator.max_turns=1 leaves no turn to talk"),
    ],
)
def test_wrong_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence.replace(".", r"\.")):
        FAMILY.environment(**settings)


def test_a_row_without_a_case_is_refused():
    with pytest.raises(UserError, match="row x has no orders and customer"):
        FAMILY.environment().reset({"id": "x", "ground_truth": {}})
