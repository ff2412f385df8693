"""The tools of an inspector. Every answer comes from a recording."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from envs.sop.domain import RecordedTools
from mtrl.environments.tools import tool

AircraftId = Annotated[str, Field(description="A letter and three digits, such as B482.")]


class Mechanical(BaseModel):
    wear: Literal["low", "limit", "cracked"]


class Electrical(BaseModel):
    charge: Literal["full", "weak", "dead"]


class CrossCheck(BaseModel):
    serial: Literal["match", "differs"]


class Incident(BaseModel):
    incident_response: Literal["repair", "replace", "ground"]


class Mismatch(BaseModel):
    mismatch_response: Literal["accepted", "quarantined"]


class Reported(BaseModel):
    reporting_response: Literal["filed", "returned"]


class AircraftTools(RecordedTools):
    @tool
    def verify_mechanical_components(self, aircraft_id: AircraftId) -> Mechanical:
        """Wear of the mechanical components, as measured last."""
        return Mechanical(**self.replay.call("verify_mechanical_components", aircraft_id=aircraft_id))

    @tool
    def verify_electrical_systems(self, aircraft_id: AircraftId) -> Electrical:
        """Charge of the batteries under load."""
        return Electrical(**self.replay.call("verify_electrical_systems", aircraft_id=aircraft_id))

    @tool
    def cross_check_specifications(self, aircraft_id: AircraftId) -> CrossCheck:
        """Whether the serial numbers on board are those of the logbook."""
        return CrossCheck(**self.replay.call("cross_check_specifications", aircraft_id=aircraft_id))

    @tool
    def report_component_incident(
        self, aircraft_id: AircraftId, system: Literal["mechanical", "electrical"]
    ) -> Incident:
        """Report a failed inspection to maintenance, which answers what is to be done."""
        result = self.replay.call("report_component_incident", aircraft_id=aircraft_id, system=system)
        return Incident(**result)

    @tool
    def report_component_mismatch(self, aircraft_id: AircraftId) -> Mismatch:
        """Report serial numbers that differ to the parts office, which answers what becomes of the part."""
        return Mismatch(**self.replay.call("report_component_mismatch", aircraft_id=aircraft_id))

    @tool
    def report_cross_check(self, aircraft_id: AircraftId) -> Reported:
        """Hand the result of the cross check to the records office, which files or returns it."""
        return Reported(**self.replay.call("report_cross_check", aircraft_id=aircraft_id))
