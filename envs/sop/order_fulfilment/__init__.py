"""Fulfilment of an order in a warehouse: the tools change the stock, and the answer depends on the actions taken."""

from pathlib import Path

from envs.sop.domain import Domain
from envs.sop.order_fulfilment.cases import decide, draw, fixture, follow
from envs.sop.order_fulfilment.tools import WarehouseTools

DOMAIN = Domain(
    name="order_fulfilment",
    order="fulfil",
    case="order_id",
    folder=Path(__file__).parent,
    fields={
        "order_status": "shipped | backordered",
        "stock_source": "shelf | overflow | missing",
        "document_number": "the number that shipping or the backorder returned",
        "shelf_stock": "what the shelf holds in the end",
    },
    draw=draw,
    decide=decide,
    fixture=fixture,
    open=WarehouseTools,
    follow=follow,
)
