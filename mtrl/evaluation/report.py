"""The report of an evaluation: metrics, comparisons and remarks, written as JSON, Markdown and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mtrl.config.schema import Config
from mtrl.environments.family import Family
from mtrl.errors import UserError
from mtrl.evaluation.comparison import ModelComparison, comparisons
from mtrl.evaluation.disagreements import Disagreement, disagreements
from mtrl.evaluation.remarks import (
    NO_SCORER,
    Remark,
    generalisation,
    independence,
    most_severe_first,
    remarks_on,
    remarks_on_comparisons,
    remarks_on_other,
)
from mtrl.evaluation.results import ModelResult, result_of
from mtrl.evaluation.rollouts import ModelRollouts
from mtrl.scoring.agreement import Thresholds
from mtrl.scoring.sources import of_source
from mtrl.utils.provenance import git_state, versions

KINDS = ("greedy", "sampled")


@dataclass(frozen=True)
class ModelReport:
    """Report on one model."""

    label: str
    source: dict[str, Any]
    """Source of the model, with the fields of `mtrl.evaluation.rollouts.Source`."""
    usage: dict[str, float]
    results: dict[str, ModelResult]
    """Results by kind, without a kind of which every episode failed."""
    lost: dict[str, dict[str, int]]
    """Number of episodes by stop reason, for each kind of which every episode failed."""
    by_source: dict[str, dict[str, ModelResult]] = field(default_factory=dict)
    """In a mixture, the results of each source by its name, and by kind."""


@dataclass(frozen=True)
class ModelsReport:
    """Report of an evaluation. The first model is the evaluated one; the others are compared with it."""

    name: str
    created: str
    models: list[ModelReport]
    comparisons: list[ModelComparison]
    disagreements: list[Disagreement]
    remarks: list[Remark]
    generalisation: str
    """Answer in words: whether the results on these rows hold for new rows."""
    independence: str
    """Answer in words: whether a judge other than the reward confirms the success."""
    method: dict[str, Any]
    """Split, rows, sampling, seed, thresholds, versions."""
    judges: dict[str, dict[str, float]] = field(default_factory=dict)
    """Requests to the judges of the reward and their cost, by judge name; the keys are those of `usage`."""

    @property
    def main(self) -> ModelReport:
        return self.models[0]

    @property
    def spending(self) -> list[tuple[str, dict[str, float]]]:
        """Usage of every model and judge that was called over an API, by name."""
        models = [(model.label, model.usage) for model in self.models if model.usage]
        return [*models, *((f"judge {name}", usage) for name, usage in self.judges.items())]


def build_report(
    models: Sequence[ModelRollouts],
    config: Config,
    family: Family,
    judges: Mapping[str, dict[str, float]] | None = None,
) -> ModelsReport:
    """Build the report of an evaluation.

    Args:
        models: Scored and rewarded episodes of at least one model; all models have the same rows.
        judges: See `ModelsReport`.

    Raises:
        UserError: Every episode of the first model failed, or a measure of the family is not in [0, 1].
    """
    evaluated = [_model(rollouts, config, family) for rollouts in models]
    main = evaluated[0]
    if not main.results:
        raise UserError(_nothing_left(models[0]))
    compared = [
        comparison
        for kind in KINDS
        for comparison in comparisons(
            main.label,
            models[0].groups.get(kind, []),
            [(other.label, other.groups.get(kind, [])) for other in models[1:]],
            kind,
            config.evaluation,
        )
    ]
    thresholds = Thresholds.of(config.evaluation)
    each = [(model.label, kind, result) for model in evaluated for kind, result in model.results.items()]
    first = next(iter(main.results.values()))
    return ModelsReport(
        name=config.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        models=evaluated,
        comparisons=compared,
        disagreements=[d for label, kind, result in each for d in disagreements(label, kind, result, thresholds)],
        remarks=_remarks(evaluated, compared, config),
        generalisation=generalisation(
            config.evaluation.split, first.rows, models[0].source, config.data.validation_rows
        ),
        independence=independence(first) if family.has_scorer else NO_SCORER,
        method=method(config, family, {kind: len(groups) for kind, groups in models[0].groups.items()}),
        judges=dict(judges or {}),
    )


def method(config: Config, family: Family, rows: dict[str, int]) -> dict[str, Any]:
    """Return the method of the evaluation. `rows` is the number of rows by kind of episodes."""
    evaluation, generator = config.evaluation, config.generator
    sampling = generator.eval_sampling_params or generator.sampling_params
    return {
        "task": family.name,
        "split": evaluation.split,
        "rows": rows,
        "samples_per_row": evaluation.samples_per_row,
        "pass_k_values": list(evaluation.pass_k_values),
        "success_threshold": evaluation.success_threshold,
        "claim_threshold": Thresholds.of(evaluation).claim,
        "confidence": evaluation.confidence,
        "max_turns": generator.max_turns,
        "max_context_length": generator.max_context_length,
        "sampling": {
            "max_generate_length": sampling.max_generate_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
        },
        "reward_scheme": config.reward.scheme,
        "seed": config.seed,
        "versions": versions(),
        "git": git_state(),
    }


def _model(rollouts: ModelRollouts, config: Config, family: Family) -> ModelReport:
    results: dict[str, ModelResult] = {}
    lost: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        groups = rollouts.groups.get(kind) or []
        result = result_of(groups, kind, config.evaluation, family)
        if result is not None:
            results[kind] = result
        elif groups:
            stops = [str(t.stop_reason) for group in groups for t in group.trajectories]
            lost[kind] = {reason: stops.count(reason) for reason in sorted(set(stops))}
    source = {key: str(value) for key, value in vars(rollouts.source).items() if value not in (None, "")}
    by_source = {name: _results_of_source(rollouts, name, config, family) for name in config.environments}
    own = {name: found for name, found in by_source.items() if found}
    return ModelReport(rollouts.label, source, dict(rollouts.usage), results, lost, own)


def _results_of_source(rollouts: ModelRollouts, name: str, config: Config, family: Family) -> dict[str, ModelResult]:
    """Return the results of one source of a mixture by kind, without a kind of which every episode failed."""
    own = ((kind, of_source(rollouts.groups.get(kind) or [], name)) for kind in KINDS)
    found = ((kind, result_of(groups, kind, config.evaluation, family)) for kind, groups in own)
    return {kind: result for kind, result in found if result is not None}


def _remarks(models: Sequence[ModelReport], compared: Sequence[ModelComparison], config: Config) -> list[Remark]:
    main, others = models[0], models[1:]
    found = [r for kind, result in main.results.items() for r in remarks_on(main.label, result, kind, config)]
    found += [
        r
        for other in others
        for kind, result in other.results.items()
        for r in remarks_on_other(other.label, result, kind)
    ]
    # A model whose sampled episodes have successes can be trained, even if no greedy episode was solved.
    solved = {model.label for model in models if any(result.success.value for result in model.results.values())}
    found = [remark for remark in found if remark.topic != "foothold" or remark.model not in solved]
    return most_severe_first([*found, *remarks_on_comparisons(compared)])


def _nothing_left(model: ModelRollouts) -> str:
    trajectories = [t for groups in model.groups.values() for group in groups for t in group.trajectories]
    head = f"there is nothing to report of {model.label}: "
    if not trajectories:
        return f"{head}no episode was run"
    first = (trajectories[0].error or f"it ended with {trajectories[0].stop_reason}").partition("\n")[0]
    return f"{head}all {len(trajectories)} episodes failed; the first: {first}"
