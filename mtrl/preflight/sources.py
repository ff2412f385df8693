"""What the checklist checks apart: the task of a run, or each source of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtrl.config.mixture import source_configs, weights_of
from mtrl.config.schema import Config
from mtrl.config.source_weights import shares_of
from mtrl.environments.factory import Task
from mtrl.preflight.result import CheckResult


def tasks_of(config: Config, task: Task) -> dict[str, tuple[Config, Task]]:
    """Return the configuration and the task of each source of a mixture by the source's name, with the prompts per step
    that it has at the start; without a mixture, those of the run by an empty name."""
    if not task.sources:
        return {"": (config, task)}
    shares, found = shares_of(weights_of(config), 0), {}
    for name, own in source_configs(config).items():
        prompts = max(1, round(shares[name] * config.trainer.prompts_per_step))
        found[name] = replace(own, trainer=replace(own.trainer, prompts_per_step=prompts)), task.sources[name]
    return found


def of_source(name: str, result: CheckResult) -> CheckResult:
    """Return the result under a name such as `words: gold`; unchanged without a mixture, whose name is empty."""
    return result.named(f"{name}: {result.name}", result.seconds) if name else result


def with_settings(config: Config, settings: Mapping[str, Mapping[str, object]]) -> Config:
    """Return the configuration with these `environment.config`, by the names of the sources."""
    sources = dict(config.environments)
    for name, own in settings.items():
        environment = {**(sources[name].get("environment") or {}), "config": dict(own)}
        sources[name] = {**sources[name], "environment": environment}
    return replace(config, environments=sources)
