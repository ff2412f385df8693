"""The scripted customer: its facts, its second request, and its insistence."""

import asyncio

import pytest

from envs.service.customer import ScriptedCustomer
from tests.envs.service.cases import case_of


def conversation(case, *speeches):
    customer = ScriptedCustomer(case.customer)

    async def talk():
        return [await customer.reply(speech) for speech in speeches]

    return asyncio.run(talk())


@pytest.mark.parametrize(
    ("speech", "answer"),
    [
        ("What is your order number?", "My order number is A100."),
        ("Please tell me your postcode.", "My postcode is 4F7."),
        ("Could you confirm your order number and ZIP?", "My order number is A100. My postcode is 4F7."),
        ("Hello, how can I help?", "I do not understand. I would like to cancel the kettle that I ordered."),
        ("", "I do not understand. I would like to cancel the kettle that I ordered."),
        ("Shall I cancel the order?", "Yes, please."),
        ("Shall I cancel order number A100?", "Yes, please."),
        ("Unfortunately, I can’t do that.", "All right."),
        ("It is done. The reference is R318.", "Thank you, goodbye."),
        ("I see order A100.", "I do not understand. I would like to cancel the kettle that I ordered."),
    ],
)
def test_answers(speech, answer):
    assert conversation(case_of(), speech) == [answer]


def test_a_refusal_because_of_a_fact_does_not_ask_for_it_again():
    told, answer = conversation(case_of(), "What is your postcode?", "I am sorry, your postcode is wrong.")
    assert (told, answer) == ("My postcode is 4F7.", "All right.")


@pytest.mark.parametrize("decision", ["Shall I cancel the order?", "I am sorry, I cannot cancel it."])
def test_a_fickle_customer_replaces_its_request_once(decision):
    first, second = conversation(case_of(change="address"), decision, "Shall I send it to 12 Oak Street?")
    assert first == "Wait, I have changed my mind. Please send the kettle that I ordered to 12 Oak Street."
    assert second == "Yes, please."


def test_a_pushy_customer_insists_once():
    refusal = "I am sorry, I cannot do that."
    assert conversation(case_of(pushes=1), refusal, refusal) == ["Could you make an exception for me?", "All right."]


def test_a_blunt_customer_uses_other_words():
    asked = conversation(case_of(voice="blunt"), "What are your order number and postcode?", "Shall I cancel it?")
    assert asked == ["Number A100. Postcode 4F7.", "Do it."]
