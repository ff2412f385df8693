"""Aircraft cases: hidden records, right answers, tool results, and the procedure as code."""

from __future__ import annotations

import random
from typing import Any

from envs.sop.domain import Procedure, drawn, recording

RESULTS = {"low": "pass", "limit": "watch", "cracked": "fail", "full": "pass", "weak": "watch", "dead": "fail"}
"""Result of the inspection by measurement."""
UNNEEDED = "unneeded"


def draw(rng: random.Random, case: str) -> dict[str, Any]:
    """Draw a hidden record."""
    return {
        "aircraft_id": case,
        "wear": drawn({"low": 0.4, "limit": 0.3, "cracked": 0.3}, rng),
        "charge": drawn({"full": 0.4, "weak": 0.3, "dead": 0.3}, rng),
        "serial": drawn({"match": 0.5, "differs": 0.5}, rng),
        "incident": {system: rng.choice(["repair", "replace", "ground"]) for system in ("mechanical", "electrical")},
        "mismatch": rng.choice(["accepted", "quarantined"]),
        "report": drawn({"filed": 0.6, "returned": 0.4}, rng),
    }


def decide(record: dict[str, Any]) -> dict[str, str]:
    """Return the right answer."""
    mechanical, electrical = RESULTS[record["wear"]], RESULTS[record["charge"]]
    failed = [name for name, result in (("mechanical", mechanical), ("electrical", electrical)) if result == "fail"]
    mismatch = record["mismatch"] if record["serial"] == "differs" else UNNEEDED
    ready = not failed and mismatch != "quarantined" and record["report"] == "filed"
    return {
        "aircraft_ready": "yes" if ready else "no",
        "mechanical_inspection_result": mechanical,
        "electrical_inspection_result": electrical,
        "component_incident_response": record["incident"][failed[0]] if failed else UNNEEDED,
        "component_mismatch_response": mismatch,
        "cross_check_reporting_response": record["report"],
    }


def fixture(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return recordings of every tool, including tools that the procedure does not call in this case, because the model
    may call them."""
    case = {"aircraft_id": record["aircraft_id"]}
    return [
        recording("verify_mechanical_components", {"wear": record["wear"]}, **case),
        recording("verify_electrical_systems", {"charge": record["charge"]}, **case),
        recording("cross_check_specifications", {"serial": record["serial"]}, **case),
        *(
            recording("report_component_incident", {"incident_response": response}, **case, system=system)
            for system, response in record["incident"].items()
        ),
        recording("report_component_mismatch", {"mismatch_response": record["mismatch"]}, **case),
        recording("report_cross_check", {"reporting_response": record["report"]}, **case),
    ]


def follow(aircraft_id: str) -> Procedure:
    """Follow the procedure with only its tools."""
    case = {"aircraft_id": aircraft_id}
    checks = ("verify_mechanical_components", "verify_electrical_systems", "cross_check_specifications")
    measured, charged, compared = yield [(name, case) for name in checks]
    answer = {
        "aircraft_ready": "no",
        "mechanical_inspection_result": RESULTS[measured["wear"]],
        "electrical_inspection_result": RESULTS[charged["charge"]],
        "component_incident_response": UNNEEDED,
        "component_mismatch_response": UNNEEDED,
    }
    reports = []
    if answer["mechanical_inspection_result"] == "fail":
        reports.append(("report_component_incident", {**case, "system": "mechanical"}))
    elif answer["electrical_inspection_result"] == "fail":
        reports.append(("report_component_incident", {**case, "system": "electrical"}))
    grounded = bool(reports)
    if compared["serial"] == "differs":
        reports.append(("report_component_mismatch", case))
    responses = yield [*reports, ("report_cross_check", case)]
    results = {key: value for response in responses for key, value in response.items()}
    answer["component_incident_response"] = results.get("incident_response", UNNEEDED)
    answer["component_mismatch_response"] = results.get("mismatch_response", UNNEEDED)
    answer["cross_check_reporting_response"] = results["reporting_response"]
    quarantined = answer["component_mismatch_response"] == "quarantined"
    if not grounded and not quarantined and results["reporting_response"] == "filed":
        answer["aircraft_ready"] = "yes"
    return answer
