"""Cases: the reference action by the procedure, and the codes that the customer must be told."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.service.case import WISHES, draw
from envs.service.clerk import careful, moves_of, response
from envs.service.data import CASES
from tests.envs.service.cases import case_of, outcome, row_of

READS = ("get_order", "end_conversation")
ADDRESS = {"order_id": "A100", "address": "12 Oak Street"}


def refused(reason):
    return "refuse_request", {"order_id": "A100", "reason": reason}


@pytest.mark.parametrize(
    ("case", "action", "told"),
    [
        (case_of("cancel"), ("cancel_order", {"order_id": "A100"}), ["R111"]),
        (case_of("address"), ("change_address", ADDRESS), ["R222"]),
        (case_of("refund", "delivered"), ("refund_order", {"order_id": "A100"}), ["R333"]),
        (case_of("cancel", "sent"), refused("sent"), ["T552"]),
        (case_of("address", "delivered", "over"), refused("sent"), ["T552"]),
        (case_of("refund", "delivered", "over"), refused("late"), ["T552"]),
        (case_of("refund", "packing"), refused("early"), []),
        (case_of("refund", "sent"), refused("early"), []),
        (case_of("cancel", known=False), refused("identity"), []),
        (case_of("cancel", change="address"), ("change_address", ADDRESS), ["R222"]),
        (case_of("refund", change="cancel"), ("cancel_order", {"order_id": "A100"}), ["R111"]),
    ],
)
def test_the_reference_action_of_worked_cases(case, action, told):
    assert case.reference_action() == action
    assert case.truth()["told"] == told


def test_a_customer_without_the_postcode_may_hear_only_its_own_number():
    truth = case_of("cancel", "sent", known=False).truth()
    assert (truth["told"], truth["tellable"]) == ([], ["A100"])
    assert truth["orders"]["A100"] == {
        "address": "1 Elm Street",
        "cancelled": False,
        "refunded": False,
        "refused": ["identity"],
    }


def test_every_kind_of_case_is_drawn(splits):
    rows = splits.train
    assert {wish["kind"] for row in rows for wish in row["customer"]["wishes"]} == set(WISHES)
    orders = [order for row in rows for order in row["ground_truth"]["orders"].values()]
    refusals = [reason for order in orders for reason in order["refused"]]
    assert set(refusals) == {"sent", "early", "late", "identity"}
    assert 0.4 < len(refusals) / len(rows) < 0.8
    assert 0.2 < sum(len(row["customer"]["wishes"]) == 2 for row in rows) / len(rows) < 0.4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(CASES))
def test_a_clerk_with_only_its_tools_and_the_customer_finds_what_the_hidden_record_demands(seed, number):
    """The labels come from the hidden record, and the clerk from words and results: two implementations."""
    row = row_of(draw(random.Random(seed), number))
    moves = moves_of(row, careful)
    writes = [call for move in moves if not isinstance(move, str) for call in move if call[0] not in READS]
    assert writes == [draw(random.Random(seed), number).reference_action()]
    assert outcome(row, list(map(response, moves))) == (1.0, 1.0)
