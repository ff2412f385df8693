"""The tools of a support agent. Every answer comes from a recording."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from envs.sop.domain import RecordedTools
from mtrl.environments.tools import tool

AccountId = Annotated[str, Field(description="A letter and three digits, such as B482.")]
TicketId = Annotated[str, Field(description="As createSessionAndOpenTicket returned it.")]


class Account(BaseModel):
    account: Literal["active", "blocked", "closed"]


class Authentication(BaseModel):
    identity: Literal["confirmed", "rejected"]


class Ticket(BaseModel):
    ticket_id: str


class Outage(BaseModel):
    outage: Literal["yes", "no"]


class Diagnostics(BaseModel):
    fault: Literal["clear", "modem", "line", "unknown"]


class Restart(BaseModel):
    restart: Literal["ok", "failed"]


class Visit(BaseModel):
    visit: Literal["booked", "full"]


class Callback(BaseModel):
    callback: Literal["agreed", "declined"]


class Escalation(BaseModel):
    queue: Literal["network", "billing"]


class Closing(BaseModel):
    closed: Literal["yes"]


class SupportTools(RecordedTools):
    @tool
    def validateAccount(self, account_id: AccountId) -> Account:
        """State of the account."""
        return Account(**self.replay.call("validateAccount", account_id=account_id))

    @tool
    def getAuthenticationDetails(self, account_id: AccountId) -> Authentication:
        """Whether the caller was recognised as the owner of the account."""
        return Authentication(**self.replay.call("getAuthenticationDetails", account_id=account_id))

    @tool
    def createSessionAndOpenTicket(self, account_id: AccountId) -> Ticket:
        """Open a session and a ticket for the caller."""
        return Ticket(**self.replay.call("createSessionAndOpenTicket", account_id=account_id))

    @tool
    def checkServiceOutage(self, account_id: AccountId) -> Outage:
        """Whether there is an outage where the customer lives."""
        return Outage(**self.replay.call("checkServiceOutage", account_id=account_id))

    @tool
    def runLineDiagnostics(self, ticket_id: TicketId) -> Diagnostics:
        """Measure the line and the modem of the ticket's customer."""
        return Diagnostics(**self.replay.call("runLineDiagnostics", ticket_id=ticket_id))

    @tool
    def restartModem(self, ticket_id: TicketId) -> Restart:
        """Restart the modem from here."""
        return Restart(**self.replay.call("restartModem", ticket_id=ticket_id))

    @tool
    def bookTechnician(self, ticket_id: TicketId) -> Visit:
        """Ask for a technician's visit within the week."""
        return Visit(**self.replay.call("bookTechnician", ticket_id=ticket_id))

    @tool
    def scheduleCallback(self, ticket_id: TicketId) -> Callback:
        """Offer to call back when the outage is over."""
        return Callback(**self.replay.call("scheduleCallback", ticket_id=ticket_id))

    @tool
    def escalateTicket(self, ticket_id: TicketId) -> Escalation:
        """Hand the ticket to the specialists."""
        return Escalation(**self.replay.call("escalateTicket", ticket_id=ticket_id))

    @tool
    def closeTicket(self, ticket_id: TicketId) -> Closing:
        """Close the ticket."""
        return Closing(**self.replay.call("closeTicket", ticket_id=ticket_id))
