"""A finding: one symptom of a run, its evidence, and the first thing to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Severity of a finding."""

    ALARM = "alarm"
    """The run fails or learns the wrong behaviour unless something is changed."""
    WARNING = "warning"
    """The symptom makes the run worse or slower."""
    NOTE = "note"
    """Information; no change is required."""

    @property
    def rank(self) -> int:
        """Rank of the severity, 0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Proposal:
    """One change, as a user would type it. One decision may need several overrides."""

    words: tuple[str, ...]
    """Overrides such as `async_config.max_steps_off_policy=0`."""
    why: str
    current: tuple[str, ...] = ()
    """Current settings of those keys (`key=value`), in the same order; filled in when the proposal is checked."""

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(word.partition("=")[0] for word in self.words)

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Witness:
    """A trajectory that shows the symptom."""

    where: str
    """Location of the trajectory, as FILE:LINE below the folder of the run."""
    summary: str
    """Summary of the trajectory in one line: reward, score, the end of the last response."""


@dataclass(frozen=True)
class Finding:
    """A symptom of a run. A rule creates it, the walk settles its proposals, and all other code only shows it."""

    severity: Severity
    title: str
    """The symptom in one sentence, with numbers."""
    rule: str = ""
    """Name of the rule in the registry, such as `hacked_reward`. The walk fills in `rule` and `requirements`."""
    requirements: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    """Sentences with the numbers and the steps."""
    metrics: tuple[str, ...] = ()
    """Keys of metrics.jsonl whose curves show the symptom, the clearest one first."""
    steps: tuple[int, int] = (0, 0)
    """First and last step that the rule examined; all steps if the rule does not set it."""
    proposals: tuple[Proposal, ...] = ()
    """Proposed changes. The first one is the change to make; the others follow if it is already made or fails."""
    advice: str = ""
    """Advice on work that no setting does, such as reading trajectories or rewriting a reward."""
    expect: str = ""
    """Expected effect of the change, and the number of steps within which it should appear."""
    look: tuple[str, ...] = ()
    """Commands that show more detail."""
    witnesses: tuple[Witness, ...] = field(default=())

    @property
    def change(self) -> Proposal | None:
        """The first thing to change."""
        return self.proposals[0] if self.proposals else None

    def with_proposals(self, proposals: tuple[Proposal, ...]) -> Finding:
        return replace(self, proposals=proposals)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding from the dict of `to_dict`.

        Raises:
            ValueError: The data is not a dict of `to_dict`.
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
