"""Support cases: hidden records, right answers, tool results, and the procedure as code."""

from __future__ import annotations

import random
from typing import Any

from envs.sop.domain import Procedure, code, drawn, recording

ACTIONS = {"outage": "scheduleCallback", "clear": "closeTicket", "modem": "restartModem", "line": "bookTechnician"}
"""Tool to call for each diagnosis; any other diagnosis is escalated."""


def draw(rng: random.Random, case: str) -> dict[str, Any]:
    """Draw a hidden record."""
    return {
        "account_id": case,
        "account": drawn({"active": 0.8, "blocked": 0.1, "closed": 0.1}, rng),
        "identity": drawn({"confirmed": 0.85, "rejected": 0.15}, rng),
        "ticket_id": f"T{code(rng)}",
        "outage": drawn({"yes": 0.25, "no": 0.75}, rng),
        "fault": rng.choice(["clear", "modem", "line", "unknown"]),
        "restart": rng.choice(["ok", "failed"]),
        "visit": rng.choice(["booked", "full"]),
        "callback": rng.choice(["agreed", "declined"]),
        "queue": rng.choice(["network", "billing"]),
    }


def decide(record: dict[str, Any]) -> dict[str, str]:
    """Return the right answer."""
    known = record["account"] == "active" and record["identity"] == "confirmed"
    diagnosis = "outage" if record["outage"] == "yes" else record["fault"]
    status = {
        "outage": "PENDING_ACTION" if record["callback"] == "agreed" else "RESOLVED",
        "clear": "RESOLVED",
        "modem": "RESOLVED" if record["restart"] == "ok" else "ESCALATED",
        "line": "PENDING_ACTION" if record["visit"] == "booked" else "ESCALATED",
        "unknown": "ESCALATED",
    }[diagnosis]
    return {
        "account_status": record["account"],
        "authentication_result": record["identity"],
        "ticket_id": record["ticket_id"] if known else "unopened",
        "diagnosis": diagnosis if known else "unchecked",
        "final_resolution_status": status if known else "FAILED",
    }


def fixture(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return recordings of every tool, including tools that the procedure does not call in this case, because the model
    may call them."""
    by_account = {
        "validateAccount": "account",
        "getAuthenticationDetails": "identity",
        "createSessionAndOpenTicket": "ticket_id",
        "checkServiceOutage": "outage",
    }
    by_ticket = {
        "runLineDiagnostics": "fault",
        "restartModem": "restart",
        "bookTechnician": "visit",
        "scheduleCallback": "callback",
        "escalateTicket": "queue",
    }
    account, ticket = ({key: record[key]} for key in ("account_id", "ticket_id"))
    return [
        *(recording(tool, {key: record[key]}, **account) for tool, key in by_account.items()),
        *(recording(tool, {key: record[key]}, **ticket) for tool, key in by_ticket.items()),
        recording("closeTicket", {"closed": "yes"}, **ticket),
    ]


def follow(account_id: str) -> Procedure:
    """Follow the procedure with only its tools."""
    account = {"account_id": account_id}
    validated, authenticated = yield [("validateAccount", account), ("getAuthenticationDetails", account)]
    answer = {
        "account_status": validated["account"],
        "authentication_result": authenticated["identity"],
        "ticket_id": "unopened",
        "diagnosis": "unchecked",
        "final_resolution_status": "FAILED",
    }
    if (validated["account"], authenticated["identity"]) != ("active", "confirmed"):
        return answer
    ticket, outage = yield [("createSessionAndOpenTicket", account), ("checkServiceOutage", account)]
    diagnosis = "outage"
    if outage["outage"] == "no":
        (measured,) = yield [("runLineDiagnostics", ticket)]
        diagnosis = measured["fault"]
    (outcome,) = yield [(ACTIONS.get(diagnosis, "escalateTicket"), ticket)]
    status = {"agreed": "PENDING_ACTION", "booked": "PENDING_ACTION", "failed": "ESCALATED", "full": "ESCALATED"}
    result = next(iter(outcome.values()))
    resolved = "ESCALATED" if diagnosis == "unknown" else status.get(result, "RESOLVED")
    return {**answer, **ticket, "diagnosis": diagnosis, "final_resolution_status": resolved}
