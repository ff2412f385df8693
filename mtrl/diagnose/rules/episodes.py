"""Episodes that fail, and conversations that cannot be joined into one sample."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import known, level, propose
from mtrl.utils.text import percent

FAILED, BREAKS = "rollout/failed_episodes", "rollout/breaks"
WANTED = ("fold", "branch", "retry", "fresh")
"""Reasons of breaks that the configuration or a program intends."""


@rule("R066", windows=0.2)
def failing_episodes(record: Record) -> Finding | None:
    """Episodes fail: the environment raises errors, or takes too long."""
    share = level(record, FAILED) / record.episodes
    seen = record.series(FAILED).last(record.window).values
    if share < 0.02 or (seen > 0).sum() < 2:
        return None
    late = level(record, "rollout/stop/timeout") > level(record, "rollout/stop/env_error")
    seconds, retries = float(record.setting("environment.step_timeout")), int(record.setting("environment.retries"))
    return Finding(
        severity=Severity.ALARM if share >= 0.2 else Severity.WARNING,
        title=f"{percent(share)} of the episodes of a step fail",
        evidence=known(
            *(
                f"{percent(level(record, key))} end with {key.rpartition('/')[2]}"
                for key in ("rollout/stop/env_error", "rollout/stop/timeout", "rollout/stop/aborted")
                if level(record, key) > 0
            ),
        ),
        metrics=(FAILED, "rollout/stop/env_error", "rollout/stop/timeout"),
        proposals=(
            *(
                (propose("twice the time for a step of the environment", environment__step_timeout=2 * seconds),)
                if late
                else ()
            ),
            propose("more attempts", environment__retries=retries + 1),
        ),
        advice="run.log has the tracebacks; mtrl preflight runs the environment without a model.",
        expect=f"{FAILED} is 0",
    )


@rule("R030", windows=0.2)
def template_breaks(record: Record) -> Finding | None:
    """Turns do not extend the tokens before them, so an episode is split into several samples."""
    own = sum(level(record, f"{BREAKS}/{reason}") for reason in WANTED)
    share = (level(record, BREAKS) - own) / record.episodes
    if share < 0.02:
        return None
    multi = bool(record.setting("generator.use_conversation_multi_turn"))
    return Finding(
        severity=Severity.WARNING,
        title=f"{share:.2f} breaks per episode: the chat template changes the text of earlier turns",
        evidence=known(
            "each break starts a new sample: more tokens are trained, and the cache of the prompt is lost",
            f"generator.use_conversation_multi_turn={str(multi).lower()}",
            f"model.renderer={record.setting('model.renderer')}",
        ),
        metrics=(BREAKS, "perf/cached_share", "perf/tokens_per_second"),
        proposals=(propose("each turn as a message of its own", generator__use_conversation_multi_turn=True),),
        advice="Templates that remove reasoning or change earlier messages break the extension: choose a renderer that "
        "leaves them unchanged (model.renderer).",
        expect=f"{BREAKS} is 0 from the first step",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )
