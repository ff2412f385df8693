"""Cases: the hidden records of a shop and of a customer, and the actions that the procedure asks for."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from envs.service.store import Store

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""

ITEMS = ("kettle", "lamp", "jacket", "clock", "tent", "radio", "mirror", "saddle")
STREETS = ("Oak", "Elm", "Mill", "Lake", "Hill", "Park", "Rose", "North")
WISHES = {"cancel": 0.3, "address": 0.3, "refund": 0.4}
"""Share of the first requests by kind."""
VOICES = ("polite", "blunt")
STATUS = {"packing": 0.4, "sent": 0.2, "delivered": 0.4}
"""Share of the cases by status of the order."""
LATE = 0.5
"""Share of the delivered orders that the shop takes back no longer."""
IMPOSTORS = 0.15
"""Share of the customers who state a wrong postcode."""
FICKLE = 0.3
"""Share of the customers who ask for something else after the agent's first decision."""
PUSHY = 0.5
"""Share of the customers who insist on a request that was refused."""
OTHERS = 2
"""Number of orders of other customers in the shop."""
CHANGES = {"cancel": "cancel_order", "address": "change_address", "refund": "refund_order"}
"""Tool that carries each wish out."""


@dataclass(frozen=True)
class Wish:
    """A request of the customer."""

    kind: str
    """One of `WISHES`."""
    address: str = ""
    """The new address; empty for other kinds."""


@dataclass(frozen=True)
class Customer:
    """Facts that only the customer knows: they reach the agent by the customer's words alone."""

    order_id: str
    postcode: str
    item: str
    wishes: tuple[Wish, ...]
    """The first request, and the one that replaces it after the agent's first decision, if there is one."""
    pushes: int
    """Number of times that the customer insists after a refusal."""
    voice: str
    """One of `VOICES`."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Customer:
        """Return the customer of a row."""
        facts = row["customer"]
        return cls(**{**facts, "wishes": tuple(Wish(**wish) for wish in facts["wishes"])})


@dataclass(frozen=True)
class Case:
    """The whole truth about one episode."""

    order_id: str
    orders: dict[str, dict[str, Any]]
    customer: Customer

    @property
    def order(self) -> dict[str, Any]:
        return self.orders[self.order_id]

    @property
    def is_known(self) -> bool:
        """Whether the customer states the postcode of the order."""
        return self.customer.postcode == self.order["postcode"]

    @property
    def final_wish(self) -> Wish:
        return self.customer.wishes[-1]

    def reference_action(self) -> Call:
        """Return the only change that the procedure asks for."""
        wish, order = self.final_wish, {"order_id": self.order_id}
        reason = "identity" if not self.is_known else refusal(wish.kind, self.order["status"], self.order["returns"])
        if reason is not None:
            return "refuse_request", {**order, "reason": reason}
        return CHANGES[wish.kind], {**order, "address": wish.address} if wish.address else order

    def truth(self) -> dict[str, Any]:
        """Return the ground truth: the state of the orders after the reference action, the codes that the agent must
        tell the customer, and those that it may tell."""
        store, (name, arguments) = Store(self.orders), self.reference_action()
        getattr(store, name)(**arguments)
        parcel = [] if self.order["parcel"] == "none" or not self.is_known else [self.order["parcel"]]
        if name == "refuse_request":
            told = parcel if arguments["reason"] in ("sent", "late") else []
        else:
            told = [self.order["references"][name]]
        tellable = {self.order_id, *told, *parcel}
        return {"orders": store.state(), "told": told, "tellable": sorted(tellable)}

    def row(self) -> dict[str, Any]:
        """Return the columns of the row that the environment reads."""
        wishes = [asdict(wish) for wish in self.customer.wishes]
        return {"orders": self.orders, "customer": {**asdict(self.customer), "wishes": wishes}}


def refusal(kind: str, status: str, returns: str) -> str | None:
    """Return the reason for which the procedure refuses a request of a known customer; None if it is allowed.

    Args:
        kind: one of `WISHES`.
        status: one of `STATUS`.
        returns: whether the time for a refund is open or over.
    """
    if kind != "refund":
        return None if status == "packing" else "sent"
    if status != "delivered":
        return "early"
    return "late" if returns == "over" else None


def draw(rng: random.Random, order_id: str) -> Case:
    """Draw the case of an order."""
    numbers = [order_id]
    while len(numbers) <= OTHERS:
        other = code(rng, "ABCDEFGHJK")
        numbers += [] if other in numbers else [other]
    orders = {number: draw_order(rng) for number in numbers}
    order = orders[order_id]
    kinds = draw_kinds(rng, 2 if rng.random() < FICKLE else 1)
    customer = Customer(
        order_id=order_id,
        postcode=draw_postcode(rng, order["postcode"]) if rng.random() < IMPOSTORS else order["postcode"],
        item=order["item"],
        wishes=tuple(Wish(kind, draw_address(rng, order["address"]) if kind == "address" else "") for kind in kinds),
        pushes=int(rng.random() < PUSHY),
        voice=rng.choice(VOICES),
    )
    return Case(order_id, {number: orders[number] for number in sorted(orders)}, customer)


def draw_kinds(rng: random.Random, count: int) -> list[str]:
    """Draw different kinds of requests."""
    left, kinds = dict(WISHES), []
    for _ in range(count):
        kinds += rng.choices(list(left), list(left.values()))
        del left[kinds[-1]]
    return kinds


def draw_order(rng: random.Random) -> dict[str, Any]:
    """Draw the record of an order."""
    status = rng.choices(list(STATUS), list(STATUS.values()))[0]
    late = rng.random() < LATE
    return {
        "item": rng.choice(ITEMS),
        "postcode": draw_postcode(rng),
        "status": status,
        "returns": "over" if late and status == "delivered" else "open",
        "parcel": "none" if status == "packing" else code(rng, "T"),
        "references": dict(zip(CHANGES.values(), draw_references(rng), strict=True)),
        "address": draw_address(rng),
        "cancelled": False,
        "refunded": False,
        "refused": [],
    }


def draw_references(rng: random.Random) -> list[str]:
    """Draw the references of the three changes, which are different."""
    return [f"R{number:03}" for number in rng.sample(range(1000), len(CHANGES))]


def draw_postcode(rng: random.Random, other_than: str = "") -> str:
    """Draw a postcode that differs from the given one."""
    while (postcode := f"{rng.randrange(10)}{rng.choice('LMPQWX')}{rng.randrange(10)}") == other_than:
        pass
    return postcode


def draw_address(rng: random.Random, other_than: str = "") -> str:
    """Draw an address that differs from the given one."""
    while (address := f"{rng.randint(1, 9)} {rng.choice(STREETS)} Street") == other_than:
        pass
    return address


def code(rng: random.Random, letters: str) -> str:
    """Draw a code: one of the letters and three digits."""
    return f"{rng.choice(letters)}{rng.randrange(1000):03}"
