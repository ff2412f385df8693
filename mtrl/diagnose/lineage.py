"""The ancestors of a run: the settings that each run changed from its parent, and the effect of the change (R155)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtrl.command.runs import holds_run
from mtrl.config import keys
from mtrl.diagnose.record import Record, Series
from mtrl.diagnose.stats import Change, compare, noise
from mtrl.errors import UserError

MOST = 20
"""Maximum number of ancestors that are read."""
IGNORED = ("name", *keys.without_effect_on_policy())
TOGETHER = (
    {"algorithm.group_size", "trainer.prompts_per_step"},
    {"algorithm.loss_fn", "algorithm.clip_low_threshold", "algorithm.clip_high_threshold"},
    {"algorithm.loss_anchor", "algorithm.off_policy_correction"},
    {"model.lora_rank", "model.lora_alpha"},
    {"model.tiny.hidden_size", "model.tiny.intermediate_size", "model.tiny.layers"},
    {"generator.gpu_memory_utilization", "generator.max_num_seqs"},
    {"generator.sampling_params.top_p", "generator.sampling_params.top_k"},
    {"trainer.mini_batches", "trainer.update_epochs"},
    {"trainer.optimizer.schedule", "trainer.optimizer.min_lr_ratio"},
)
"""Groups of keys that count as one decision."""
METRICS = {
    "rollout/success/mean": "success of training rollouts",
    "rollout/reward/mean": "training reward",
}


@dataclass(frozen=True)
class ChangedSetting:
    """A key whose value differs between a child and its parent."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {keys.typed(self.before)} → {keys.typed(self.after)}"

    @property
    def word(self) -> str:
        return f"{self.key}={keys.typed(self.after)}"


@dataclass(frozen=True)
class Effect:
    """One metric compared between parent and child over the same steps."""

    metric: str
    name: str
    change: Change
    steps: tuple[int, int]

    @property
    def verdict(self) -> str:
        """better | worse | no clear difference"""
        if abs(self.change.z) < 2.5:
            return "no clear difference"
        return "better" if self.change.difference > 0 else "worse"


@dataclass(frozen=True)
class Link:
    """The changes and effects from a parent to its child."""

    parent: str
    child: str
    settings: tuple[ChangedSetting, ...]
    effects: tuple[Effect, ...]

    @property
    def decisions(self) -> int:
        """Number of decisions that were changed at once; keys that belong together count as one."""
        left = {setting.key for setting in self.settings}
        count = 0
        for group in TOGETHER:
            if left & group:
                left -= group
                count += 1
        return count + len(left)

    @property
    def verdict(self) -> str:
        """Verdict on success, else on the reward; "too early to tell" if there are too few steps in common."""
        return self.effects[0].verdict if self.effects else "too early to tell"

    def to_dict(self) -> dict[str, Any]:
        effects = [{**asdict(effect), "verdict": effect.verdict} for effect in self.effects]
        return {**asdict(self), "effects": effects, "decisions": self.decisions, "verdict": self.verdict}


def lineage(record: Record) -> list[Link]:
    """Return the links from the oldest ancestor to this run; empty for a run without a parent.

    Raises:
        UserError: A parent is not a run.
    """
    records = [record, *_ancestors(record)][::-1]
    return [_link(parent, child) for parent, child in pairwise(records)]


def tried_in_vain(links: list[Link]) -> list[tuple[str, ...]]:
    """Return the changes that did not help, as overrides, so that they are not proposed again."""
    return [
        tuple(setting.word for setting in link.settings)
        for link in links
        if link.settings and link.verdict in ("no clear difference", "worse")
    ]


def _ancestors(record: Record) -> Iterator[Record]:
    seen = {record.path.resolve()} if record.path else set()
    for _ in range(MOST):
        name = record.setting("parent")
        if not name:
            return
        path = _find(str(name), record.path)
        if path.resolve() in seen:
            return
        seen.add(path.resolve())
        record = Record.load(path)
        yield record


def _find(name: str, child: Path | None) -> Path:
    """Return the folder of a parent: the path in the child's configuration, else the folder of that name beside the
    child, because folders of runs are moved together."""
    places = [Path(name), *([child.parent / Path(name).name] if child else [])]
    found = next((place for place in places if place.is_dir() and holds_run(place)), None)
    if found is None:
        raise UserError(f"parent={name} is no run; it was moved or removed: put it back, or beside its child")
    return found


def _link(parent: Record, child: Record) -> Link:
    effects = [effect for metric, name in METRICS.items() if (effect := _effect(parent, child, metric, name))]
    held_out = _held_out(parent, child)
    return Link(
        str(parent.path),
        str(child.path),
        tuple(differences(parent.config, child.config)),
        tuple([*effects[:1], *([held_out] if held_out else []), *effects[1:]]),
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ChangedSetting]:
    """Return the keys with different values. A missing key has the schema's default."""
    first, second = keys.flat(before), keys.flat(after)
    found = []
    for key in sorted({*first, *second}):
        if any(key == ignored or key.startswith(f"{ignored}.") for ignored in IGNORED):
            continue
        known = keys.all_keys().get(key)
        default = known.default if known else None
        was, now = first.get(key, default), second.get(key, default)
        if was != now and not (isinstance(was, tuple) and list(was) == now):
            found.append(ChangedSetting(key, was, now))
    return found


def _effect(parent: Record, child: Record, metric: str, name: str) -> Effect | None:
    """Compare a metric over the last window of the steps that both runs have."""
    last = min(parent.step, child.step)
    width = min(parent.window, child.window)
    first = last - width + 1
    before, after = (_between(each.series(metric), first, last) for each in (parent, child))
    if min(len(before), len(after)) < 5:
        return None
    spread = max(noise(parent.series(metric).values), noise(child.series(metric).values))
    return Effect(metric, name, compare(before.values, after.values, spread), (first, last))


def _between(series: Series, first: int, last: int) -> Series:
    return series.since(first).until(last)


def _held_out(parent: Record, child: Record) -> Effect | None:
    """Compare held-out success at the last evaluation that both runs have. The two are treated as independent, which
    is conservative."""
    key = "val/success/mean"
    common = sorted({*parent.series(key).steps.tolist()} & {*child.series(key).steps.tolist()} - {0})
    if not common:
        return None
    step = int(common[-1])
    rates = [float(_between(each.series(key), step, step).values[-1]) for each in (parent, child)]
    counts = [_episodes(each, step) for each in (parent, child)]
    variance = sum(_variance(rate, count) for rate, count in zip(rates, counts, strict=True))
    change = Change(rates[0], rates[1], math.sqrt(variance))
    return Effect(key, f"held-out success at step {step}", change, (step, step))


def _episodes(record: Record, step: int) -> float:
    found = _between(record.series("val/episodes"), step, step).values
    return max(1.0, float(found[-1]) if len(found) else float(record.setting("evaluation.rows")))


def _variance(rate: float, count: float) -> float:
    share = (rate * count + 1) / (count + 2)  # never exactly 0 or 1
    return share * (1 - share) / count
