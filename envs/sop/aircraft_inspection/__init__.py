"""Inspection of an aircraft before its flight: three checks, up to three reports, six answer fields. The tools only
read."""

from pathlib import Path

from envs.sop.aircraft_inspection.cases import decide, draw, fixture, follow
from envs.sop.aircraft_inspection.tools import AircraftTools
from envs.sop.domain import Domain

DOMAIN = Domain(
    name="aircraft_inspection",
    order="inspect",
    case="aircraft_id",
    folder=Path(__file__).parent,
    fields={
        "aircraft_ready": "yes | no",
        "mechanical_inspection_result": "pass | watch | fail",
        "electrical_inspection_result": "pass | watch | fail",
        "component_incident_response": "what the report answered | unneeded",
        "component_mismatch_response": "what the report answered | unneeded",
        "cross_check_reporting_response": "what the report answered",
    },
    draw=draw,
    decide=decide,
    fixture=fixture,
    open=AircraftTools,
    follow=follow,
)
