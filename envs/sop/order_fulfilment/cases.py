"""Order cases: hidden records, right answers, initial stores, and the procedure as code."""

from __future__ import annotations

import random
from typing import Any

from envs.sop.domain import Procedure, drawn
from envs.sop.order_fulfilment.store import document_number

LETTERS = "ABCDEFGHJK"


def draw(rng: random.Random, case: str) -> dict[str, Any]:
    """Draw a hidden record. Shelf and overflow together hold at most nine pieces."""
    source = drawn({"shelf": 0.4, "overflow": 0.35, "missing": 0.25}, rng)
    quantity = rng.randint(2, 5)
    shelf = rng.randint(quantity, 9) if source == "shelf" else rng.randrange(quantity)
    lacking = max(0, quantity - shelf)
    overflow = rng.randrange(lacking) if source == "missing" else rng.randint(lacking, 9 - shelf)
    return {
        "order_id": case,
        "sku": f"{rng.choice(LETTERS)}{rng.randrange(10)}",
        "quantity": quantity,
        "service": rng.choice(["standard", "express"]),
        "shelf": shelf,
        "overflow": overflow,
    }


def decide(record: dict[str, Any]) -> dict[str, str]:
    """Return the right answer."""
    order_id, quantity, shelf = record["order_id"], record["quantity"], record["shelf"]
    source = "shelf" if shelf >= quantity else "overflow" if shelf + record["overflow"] >= quantity else "missing"
    left = shelf + (0 if source == "shelf" else record["overflow"]) - (0 if source == "missing" else quantity)
    how = "backorder" if source == "missing" else record["service"]
    return {
        "order_status": "backordered" if source == "missing" else "shipped",
        "stock_source": source,
        "document_number": document_number(order_id, how, left),
        "shelf_stock": str(left),
    }


def fixture(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record, which is also the initial state of the store."""
    return record


def follow(order_id: str) -> Procedure:
    """Follow the procedure with only its tools."""
    case = {"order_id": order_id}
    order, reservation = yield [("getOrder", case), ("reserveStock", case)]
    article, source = {"sku": order["sku"]}, "shelf"
    if reservation["reserved"] == "short":
        _, reservation = yield [("moveOverflow", article), ("reserveStock", case)]
        source = "overflow"
    if reservation["reserved"] == "short":
        source, end = "missing", ("openBackorder", case)
    else:
        end = ("shipOrder", {**case, "service": order["service"]})
    document, stock = yield [end, ("getStock", article)]
    return {
        "order_status": "backordered" if source == "missing" else "shipped",
        "stock_source": source,
        "document_number": document["document_number"],
        "shelf_stock": str(stock["shelf"]),
    }
