"""The tools of a warehouse clerk. Most of them change the store of the episode."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from envs.sop.order_fulfilment.store import Store
from mtrl.environments.base import Resources
from mtrl.environments.tools import tool

OrderId = Annotated[str, Field(description="A letter and three digits, such as B482.")]
Sku = Annotated[str, Field(description="Number of the article, as getOrder returned it.")]
Service = Literal["standard", "express"]


class Order(BaseModel):
    sku: str
    quantity: int
    service: Service


class Stock(BaseModel):
    shelf: int


class Reservation(BaseModel):
    reserved: Literal["full", "short", "released"]


class Document(BaseModel):
    document_number: str


class WarehouseTools:
    def __init__(self, fixture: dict[str, Any], resources: Resources):
        self.store = Store(fixture, resources)

    @tool
    def getOrder(self, order_id: OrderId) -> Order:
        """Article, quantity and service of an order."""
        order = self.store.order(order_id)
        return Order(sku=order["sku"], quantity=order["quantity"], service=order["service"])

    @tool
    def getStock(self, sku: Sku) -> Stock:
        """What the shelf holds of an article now. Reserved pieces are no longer on it."""
        return Stock(shelf=self.store.stock(sku)["shelf"])

    @tool
    def reserveStock(self, order_id: OrderId) -> Reservation:
        """Take the quantity of an order off the shelf. Where the shelf is short of it, nothing is taken."""
        return Reservation(reserved="full" if self.store.reserve(order_id) else "short")

    @tool
    def releaseStock(self, order_id: OrderId) -> Reservation:
        """Put what was reserved for an order back on the shelf."""
        self.store.release(order_id)
        return Reservation(reserved="released")

    @tool
    def moveOverflow(self, sku: Sku) -> Stock:
        """Move all pieces of an article from the overflow to the shelf. They are not moved back."""
        self.store.move_overflow(sku)
        return Stock(shelf=self.store.stock(sku)["shelf"])

    @tool
    def shipOrder(self, order_id: OrderId, service: Service) -> Document:
        """Hand a reserved order to the carrier. This cannot be undone."""
        return Document(document_number=self.store.ship(order_id, service))

    @tool
    def openBackorder(self, order_id: OrderId) -> Document:
        """Put off an order that could not be reserved. This cannot be undone."""
        return Document(document_number=self.store.backorder(order_id))
