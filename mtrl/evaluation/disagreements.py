"""All episodes on which reward and scorer disagree, each with its last response."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtrl.evaluation.results import ModelResult
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement
from mtrl.scoring.measures import ScoredEpisode
from mtrl.utils.text import cut

RESPONSE_CHARACTERS = 4000


@dataclass(frozen=True)
class Disagreement:
    """One episode on which reward and scorer disagree."""

    model: str
    kind: str
    id: str
    """Id of the trajectory: its group and its index within the group."""
    row: str
    verdict: TrajectoryAgreement
    reward: float
    score: float | None
    last_response: str
    """Text of the last turn. The middle of a long text is left out."""
    episode: ScoredEpisode = field(repr=False)


def disagreements(model: str, kind: str, result: ModelResult, thresholds: Thresholds) -> list[Disagreement]:
    """Return the disagreements: first the lenient ones, then the strict ones, each in the order of the rows."""
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
        for chosen in (TrajectoryAgreement.LENIENT, TrajectoryAgreement.STRICT)
        for verdict, episode in judged
        if verdict == chosen
    ]
