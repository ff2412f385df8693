"""The shop's orders during one episode, and the tools that read and change them."""

from __future__ import annotations

import copy
from typing import Any, Literal

from mtrl.environments.tools import ToolError, tool

WRITTEN = ("address", "cancelled", "refunded", "refused")
"""Fields of an order that the tools can change: together they are the state of the order."""
REASONS = ("sent", "early", "late", "identity")
"""Reasons to refuse a request: see `procedure.md`."""
SHOWN = ("item", "status", "returns", "parcel")
"""Fields of an order that the agent sees."""


class Store:
    """The orders of one episode.

    The tools execute every call: the procedure, and no tool, says when a change is right. No change can be undone, so
    that an agent that tries every change never ends in the right state.
    """

    def __init__(self, orders: dict[str, dict[str, Any]]):
        """`orders`: order by number, as `envs.service.case.Case.orders` returns them."""
        self.orders = copy.deepcopy(orders)

    @tool
    def get_order(self, order_id: str, postcode: str) -> dict[str, Any]:
        """Look an order up. The postcode is the one that the customer states; without the right one nothing is shown.
        `returns` says whether the time in which the shop takes a delivered order back is open or over, and `parcel` is
        the number of the parcel."""
        order = self._order(order_id)
        if postcode != order["postcode"]:
            return {"identity": "wrong"}
        return {"identity": "confirmed", **{name: order[name] for name in SHOWN}}

    @tool
    def cancel_order(self, order_id: str) -> dict[str, str]:
        """Cancel an order. The result is the reference of the cancellation."""
        return self._change(order_id, "cancel_order", cancelled=True)

    @tool
    def change_address(self, order_id: str, address: str) -> dict[str, str]:
        """Send an order to another address, written as the customer wrote it. The result is the reference of the
        change."""
        return self._change(order_id, "change_address", address=address)

    @tool
    def refund_order(self, order_id: str) -> dict[str, str]:
        """Refund the price of an order. The result is the reference of the refund."""
        return self._change(order_id, "refund_order", refunded=True)

    @tool
    def refuse_request(self, order_id: str, reason: Literal["sent", "early", "late", "identity"]) -> dict[str, str]:
        """Record that the request was refused, and why."""
        order = self._order(order_id)
        order["refused"] = sorted({*order["refused"], reason})
        return {"recorded": "yes"}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the state of each order by its number: the fields in `WRITTEN`."""
        return {number: {name: order[name] for name in WRITTEN} for number, order in self.orders.items()}

    def _change(self, order_id: str, change: str, **fields: Any) -> dict[str, str]:
        order = self._order(order_id)
        order.update(fields)
        return {"reference": order["references"][change]}

    def _order(self, order_id: str) -> dict[str, Any]:
        if order_id not in self.orders:
            raise ToolError("there is no order with this number")
        return self.orders[order_id]
