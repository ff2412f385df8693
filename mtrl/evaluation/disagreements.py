"""The episodes on which reward and scorer disagree: all are kept, with what was said last."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtrl.evaluation.agreement import Thresholds, Verdict
from mtrl.evaluation.measures import Episode
from mtrl.evaluation.results import Result
from mtrl.tracking.text import cut

RESPONSE_CHARACTERS = 4000


@dataclass(frozen=True)
class Disagreement:
    """One episode."""

    model: str
    kind: str
    id: str
    """Of the trajectory: its group and its place within it."""
    row: str
    verdict: Verdict
    reward: float
    score: float | None
    last_response: str
    """Its middle is left out where it is long."""
    episode: Episode = field(repr=False)


def disagreements(model: str, kind: str, result: Result, thresholds: Thresholds) -> list[Disagreement]:
    """The lenient ones first, then the strict ones, each in the order of the rows."""
    judged = [(thresholds.verdict(e.trajectory), e) for e in result.seen]
    return [
        Disagreement(
            model=model,
            kind=kind,
            id=episode.id,
            row=episode.row_id,
            verdict=verdict,
            reward=episode.trajectory.reward,
            score=episode.trajectory.score,
            last_response=cut(episode.trajectory.turns[-1].text, RESPONSE_CHARACTERS, 200),
            episode=episode,
        )
        for wanted in (Verdict.LENIENT, Verdict.STRICT)
        for verdict, episode in judged
        if verdict == wanted
    ]
