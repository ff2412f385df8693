"""The procedure as code: a clerk who knows only what the customer says and what the tools return.

A clerk is a generator: it yields a move, which is a text for the customer or the calls of a turn, and receives the
customer's answer or the results of the calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

from envs.service.case import CHANGES, Call, Customer, Wish, refusal
from envs.service.customer import ScriptedCustomer, opening
from envs.service.store import Store
from mtrl.environments.tool_calls import format_call
from mtrl.environments.tools import toolbox
from mtrl.types import Row

Move = str | list[Call]
Clerk = Generator[Move, Any, None]

ASK = "What are your order number and your postcode?"
QUESTIONS = {
    "cancel": "Shall I cancel the order?",
    "address": "Shall I send the order to {address}?",
    "refund": "Shall I refund the order?",
}
"""Question for a confirmation, by kind of the request."""
REFUSALS = {
    "identity": "I am sorry, I cannot help you with this order.",
    "sent": "I am sorry, I cannot do that: the parcel {parcel} was sent.",
    "early": "I am sorry, I cannot refund an order before it is delivered.",
    "late": "I am sorry, I cannot refund it: the parcel {parcel} was delivered too long ago.",
}
"""Refusal by its reason."""
AGAIN = "I am sorry, I cannot do that either."
"""Refusal of a second request, after the parcel was named."""
DONE = "It is done. The reference is {reference}."
END: Call = ("end_conversation", {})


def careful(words: str) -> Clerk:
    """Follow the procedure. `words` are the customer's first words."""
    facts = yield ASK
    order_id, postcode = read_order(facts), read_postcode(facts)
    (found,) = yield [("get_order", {"order_id": order_id, "postcode": postcode})]
    named = False  # whether the customer knows the number of the parcel
    while True:
        wish = read_wish(words)
        reason = refusal_of(found, wish)
        answer = yield decision(found, wish, reason, named)
        named = named or reason in ("sent", "late")
        if names_wish(answer):
            words = answer
        elif reason is None:
            yield from carry_out(order_id, wish)
            return
        else:
            yield [("refuse_request", {"order_id": order_id, "reason": reason}), END]
            return


def obliging(words: str) -> Clerk:
    """Do what the customer asks for first, without looking at the order and without asking for a confirmation."""
    facts = yield ASK
    yield from carry_out(read_order(facts), read_wish(words))


def dismissive(words: str) -> Clerk:
    """Refuse at once."""
    yield REFUSALS["identity"]
    yield [END]


def carry_out(order_id: str, wish: Wish) -> Clerk:
    """Make the change, tell the customer its reference, and end the conversation."""
    arguments = {"order_id": order_id, "address": wish.address} if wish.address else {"order_id": order_id}
    (result,) = yield [(CHANGES[wish.kind], arguments)]
    yield DONE.format(**result)
    yield [END]


def refusal_of(found: dict[str, Any], wish: Wish) -> str | None:
    """Return the reason to refuse a request, by the order as the tool shows it; None if the request is allowed."""
    if found["identity"] != "confirmed":
        return "identity"
    return refusal(wish.kind, found["status"], found["returns"])


def decision(found: dict[str, Any], wish: Wish, reason: str | None, named: bool) -> str:
    """Return the question for a confirmation, or the refusal. `named`: whether the parcel was named before."""
    if reason is None:
        return QUESTIONS[wish.kind].format(address=wish.address)
    return AGAIN if named else REFUSALS[reason].format(**found)


def read_order(words: str) -> str:
    """Return the order number in the customer's words."""
    return re.findall(r"\b[A-Z][0-9]{3}\b", words)[0]


def read_postcode(words: str) -> str:
    """Return the postcode in the customer's words."""
    return re.findall(r"\b[0-9][A-Z][0-9]\b", words)[0]


def read_wish(words: str) -> Wish:
    """Return the request in the customer's words."""
    address = re.findall(r"[0-9]+ [A-Z][a-z]+ Street", words)
    if address:
        return Wish("address", address[0])
    return Wish("cancel" if "ancel" in words else "refund")


def names_wish(words: str) -> bool:
    """Whether the customer's words replace the request."""
    return "changed my mind" in words or "something else" in words


def moves_of(row: Row, clerk: Callable[[str], Clerk]) -> list[Move]:
    """Return the moves of a clerk on a row, with the scripted customer and the tools."""
    facts = Customer.of(row)
    customer, tools = ScriptedCustomer(facts), toolbox(Store(row["orders"]))
    at_work = clerk(opening(facts))
    moves = [next(at_work)]
    while isinstance(moves[-1], str) or END not in moves[-1]:
        move = moves[-1]
        seen = customer.answer(move) if isinstance(move, str) else [tools[n].function(**args) for n, args in move]
        moves.append(at_work.send(seen))
    return moves


def response(move: Move) -> str:
    """Return a move as the agent's response."""
    return move if isinstance(move, str) else "".join(format_call(*call) for call in move)
