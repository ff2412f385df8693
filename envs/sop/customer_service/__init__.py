"""Support of a customer whose line is down: ten tools that only read, at most five turns, five answer fields."""

from pathlib import Path

from envs.sop.customer_service.cases import decide, draw, fixture, follow
from envs.sop.customer_service.tools import SupportTools
from envs.sop.domain import Domain

DOMAIN = Domain(
    name="customer_service",
    order="support",
    case="account_id",
    folder=Path(__file__).parent,
    fields={
        "account_status": "active | blocked | closed",
        "authentication_result": "confirmed | rejected",
        "ticket_id": "the id of the ticket | unopened",
        "diagnosis": "outage | clear | modem | line | unknown | unchecked",
        "final_resolution_status": "RESOLVED | PENDING_ACTION | ESCALATED | FAILED",
    },
    draw=draw,
    decide=decide,
    fixture=fixture,
    open=SupportTools,
    follow=follow,
)
