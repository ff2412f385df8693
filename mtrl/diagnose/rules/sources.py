"""Sources of a mixture: one that is paused, one that never succeeds, and one that falls while the others do not."""

from __future__ import annotations

from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.registry import rule
from mtrl.diagnose.views import from_to, known, level, over_the_run
from mtrl.utils.text import percent

NEVER = 0.005
"""Largest share of successful rollouts that counts as none."""
FALL = 0.1
"""Smallest certain fall of the success of a source that is reported."""


def source_names(record: Record) -> list[str]:
    """Return the names of the sources of the mixture; empty for a run on one task."""
    return [str(name) for name in record.setting("environments") or {}]


def success_of(name: str) -> str:
    """Return the metric with the success of the training rollouts of a source."""
    return f"rollout/{name}/success/mean"


@rule("R066", windows=0.2)
def paused_source(record: Record) -> Finding | None:
    """A source of a mixture is paused, since its episodes keep failing."""
    pauses = {name: record.series(f"data/{name}/paused").values for name in source_names(record)}
    paused = [name for name, values in pauses.items() if len(values) and values[-1]]
    if not paused:
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"No rows of {', '.join(paused)} are drawn: episodes keep failing",
        evidence=known(*(f"{name} was paused in {int(pauses[name].sum())} of {record.steps} steps" for name in paused)),
        metrics=tuple(key for name in paused for key in (f"data/{name}/paused", f"rollout/{name}/failed_episodes")),
        advice="run.log has the tracebacks. Correct the environment of the source and resume the run; its rows are "
        "drawn again by themselves.",
        expect=" and ".join(f"data/{name}/paused" for name in paused) + " return to 0",
    )


@rule("R148", windows=1.0)
def unsolved_source(record: Record) -> Finding | None:
    """No rollout of a source of a mixture succeeds, while other sources do."""
    measured = [name for name in source_names(record) if len(record.series(success_of(name))) >= record.window]
    shares = {name: level(record, success_of(name)) for name in measured}
    never = [
        name for name in measured if shares[name] <= NEVER and record.series(success_of(name)).values.max() <= 5 * NEVER
    ]
    if not never or len(never) == len(measured):
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"No rollouts of {', '.join(never)} succeed",
        evidence=tuple(
            f"success of the last {record.window} steps with rows of {name}: {percent(shares[name])}"
            for name in measured
        ),
        metrics=tuple(success_of(name) for name in never),
        proposals=tuple(
            Proposal((f"environments.{name}.weight=0",), f"train the other sources first, and only evaluate {name}")
            for name in never
        ),
        advice="The filter Task of the viewer shows NAME/. Groups with equal rewards teach nothing: "
        "give the source easier rows, a reward for parts of an answer, more turns "
        "(environments.NAME.generator.max_turns) or a warm start that reaches some successes.",
        expect=" and ".join(success_of(name) for name in never) + " rise above 0",
        look=(f"mtrl view {record.path or 'RUN'}",),
    )


@rule("R148", windows=1.0)
def falling_source(record: Record) -> Finding | None:
    """The success of a source of a mixture falls, while that of the others does not."""
    changes = {name: change for name in source_names(record) if (change := over_the_run(record, success_of(name)))}
    falling = [name for name, change in changes.items() if change.at_least() <= -FALL]
    others = [name for name in changes if name not in falling]
    if not falling or not others or any(changes[name].at_least() < 0 for name in others):
        return None
    return Finding(
        severity=Severity.WARNING,
        title=f"The success of {', '.join(falling)} falls, and that of {', '.join(others)} does not",
        evidence=tuple(from_to(f"the success of the rollouts of {name}", change) for name, change in changes.items()),
        metrics=tuple(success_of(name) for name in changes),
        proposals=tuple(_more_weight(record, name) for name in falling),
        advice="Training on one source may undo what another has taught; so may rows of a source that become harder.",
        expect=" and ".join(success_of(name) for name in falling) + " stop falling",
    )


def _more_weight(record: Record, name: str) -> Proposal:
    """Return the proposal to double the weight of a source; all points of a schedule are doubled."""
    weight = (record.setting("environments")[name] or {}).get("weight", 1.0)
    if isinstance(weight, int | float):
        return Proposal((f"environments.{name}.weight={2 * weight:g}",), f"twice the weight of {name}")
    points = ",".join(f"[{rows},{2 * value:g}]" for rows, value in weight)
    return Proposal((f"environments.{name}.weight=[{points}]",), f"twice the weight of {name}")
