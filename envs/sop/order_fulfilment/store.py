"""The warehouse of one episode: one order and one article, in a private in-memory database."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from typing import Any

from mtrl.environments.base import Resources
from mtrl.environments.tools import ToolError

SCHEMA = """
create table stock (sku text primary key, shelf integer not null, overflow integer not null);
create table orders (order_id text primary key, sku text not null, quantity integer not null, service text not null,
                     reserved integer not null default 0, document text);
"""


class Store:
    """Stock and orders. Every change is a transaction; an invalid operation changes nothing."""

    def __init__(self, fixture: dict[str, Any], resources: Resources):
        """`fixture` holds order_id, sku, quantity, service, shelf and overflow."""
        # Tools are called sequentially on the episode's thread, but the connection is closed on another thread.
        self._database = resources.enter_context(closing(sqlite3.connect(":memory:", check_same_thread=False)))
        self._database.row_factory = sqlite3.Row
        with self._database:
            self._database.executescript(SCHEMA)
            self._database.execute("insert into stock values (:sku, :shelf, :overflow)", fixture)
            self._database.execute(
                "insert into orders (order_id, sku, quantity, service) values (:order_id, :sku, :quantity, :service)",
                fixture,
            )

    def order(self, order_id: str) -> sqlite3.Row:
        """Return an order. Raises `ToolError` if there is no such order."""
        return self._one("select * from orders where order_id = ?", order_id, "order")

    def stock(self, sku: str) -> sqlite3.Row:
        """Return the stock of an article. Raises `ToolError` if there is no such article."""
        return self._one("select * from stock where sku = ?", sku, "article")

    def reserve(self, order_id: str) -> bool:
        """Take the order's quantity off the shelf. Return False, without a change, if the shelf does not hold the
        quantity."""
        order = self._open_order(order_id)
        if order["reserved"]:
            raise ToolError("the order is reserved already")
        if self.stock(order["sku"])["shelf"] < order["quantity"]:
            return False
        with self._database:
            self._database.execute(
                "update stock set shelf = shelf - ? where sku = ?", (order["quantity"], order["sku"])
            )
            self._database.execute("update orders set reserved = 1 where order_id = ?", (order_id,))
        return True

    def release(self, order_id: str) -> None:
        """Put the reserved quantity back on the shelf."""
        order = self._open_order(order_id)
        if not order["reserved"]:
            raise ToolError("nothing is reserved for the order")
        with self._database:
            self._database.execute(
                "update stock set shelf = shelf + ? where sku = ?", (order["quantity"], order["sku"])
            )
            self._database.execute("update orders set reserved = 0 where order_id = ?", (order_id,))

    def move_overflow(self, sku: str) -> None:
        """Move the whole overflow to the shelf."""
        self.stock(sku)
        with self._database:
            self._database.execute("update stock set shelf = shelf + overflow, overflow = 0 where sku = ?", (sku,))

    def ship(self, order_id: str, service: str) -> str:
        """End the order with a consignment, and return its number."""
        if not self._open_order(order_id)["reserved"]:
            raise ToolError("nothing is reserved for the order")
        return self._end(order_id, service)

    def backorder(self, order_id: str) -> str:
        """End the order with a backorder, and return its number."""
        if self._open_order(order_id)["reserved"]:
            raise ToolError("the order is reserved; release it first")
        return self._end(order_id, "backorder")

    def _end(self, order_id: str, how: str) -> str:
        number = document_number(order_id, how, self.stock(self.order(order_id)["sku"])["shelf"])
        with self._database:
            self._database.execute("update orders set document = ? where order_id = ?", (number, order_id))
        return number

    def _open_order(self, order_id: str) -> sqlite3.Row:
        order = self.order(order_id)
        if order["document"]:
            raise ToolError("the order is done already")
        return order

    def _one(self, query: str, key: str, what: str) -> sqlite3.Row:
        found = self._database.execute(query, (key,)).fetchone()
        if found is None:
            raise ToolError(f"there is no such {what}")
        return found


def document_number(order_id: str, how: str, shelf: int) -> str:
    """Return the number of a document. Consignments begin with X, backorders with B; the digits depend on order,
    service and current stock."""
    digest = hashlib.sha256(f"{order_id}/{how}/{shelf}".encode()).digest()
    return f"{'B' if how == 'backorder' else 'X'}{int.from_bytes(digest[:4], 'big') % 1000:03}"
