"""A finding: one symptom of a run, what shows it, and the first thing to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad it is."""

    ALARM = "alarm"
    """The run is lost, or teaches the wrong thing, unless something is changed."""
    WARNING = "warning"
    """It costs the run something."""
    NOTE = "note"
    """Worth knowing; nothing has to be done."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Proposal:
    """One change, as it would be typed; a decision may take more than one word."""

    words: tuple[str, ...]
    """Overrides such as `async_config.max_steps_off_policy=0`."""
    why: str
    current: tuple[str, ...] = ()
    """What those keys are now, in the same order; filled in when the proposal is checked."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(word.partition("=")[0] for word in self.words)

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Witness:
    """A trajectory that shows the symptom."""

    where: str
    """FILE:LINE below the folder of the run."""
    said: str
    """What it shows, in one line: reward, score, the end of the last response."""


@dataclass(frozen=True)
class Finding:
    """A symptom. Frozen: a rule makes it, the walk settles its proposals, and everything else only shows it."""

    severity: Severity
    title: str
    """The symptom in one sentence, with numbers."""
    rule: str = ""
    """Its name in the registry, such as `hacked_reward`; the walk fills it in, and `requirements`."""
    requirements: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    """Sentences with the numbers and the steps."""
    metrics: tuple[str, ...] = ()
    """Keys of metrics.jsonl whose curves show it, the most telling one first."""
    steps: tuple[int, int] = (0, 0)
    """First and last step that were looked at; where the rule does not say, all of them."""
    proposals: tuple[Proposal, ...] = ()
    """The first one is what to change; the others are for when it is done or has not helped."""
    advice: str = ""
    """What no setting does: what to look at, or to write otherwise."""
    expect: str = ""
    """What should then be seen, and within how many steps."""
    look: tuple[str, ...] = ()
    """Commands that show more."""
    witnesses: tuple[Witness, ...] = field(default=())

    @property
    def change(self) -> Proposal | None:
        """The first thing to change."""
        return self.proposals[0] if self.proposals else None

    def with_proposals(self, proposals: tuple[Proposal, ...]) -> Finding:
        return replace(self, proposals=proposals)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Back from JSON.

        Raises:
            ValueError: it is not what `to_dict` writes.
        """
        try:
            return cls(
                **{
                    **data,
                    "severity": Severity(data["severity"]),
                    "proposals": tuple(
                        Proposal(**{**each, "words": tuple(each["words"]), "current": tuple(each["current"])})
                        for each in data["proposals"]
                    ),
                    "witnesses": tuple(Witness(**each) for each in data["witnesses"]),
                    **{name: tuple(data[name]) for name in ("requirements", "evidence", "metrics", "steps", "look")},
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no finding: {type(error).__name__}: {error}") from error
