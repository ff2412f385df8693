"""Search for runs, and groups of runs that differ only by their seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from mtrl.config.keys import without_effect_on_policy
from mtrl.errors import UserError
from mtrl.figures.episodes import StoredEpisodes, read_episodes
from mtrl.record import library
from mtrl.record.run import Run
from mtrl.utils.text import one_line

APART = ("seed", *without_effect_on_policy())
"""Settings, and sections of settings, that do not distinguish experiments."""
NAMES = {"algorithm.advantage_method": "algorithm", "algorithm.loss_fn": "loss", "environment.name": "environment"}
"""Names of keys in labels, where they differ from the last part of the key."""
FIRST = ("name", "environment.name", "model.name", "algorithm.advantage_method", "algorithm.loss_fn")
"""Keys that labels prefer, if they distinguish the groups."""

LEVELS = 2
"""Maximum depth below a given folder at which runs are searched: sweep/run, study/arm/seed."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one experiment, one per seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    @cached_property
    def episodes_by_run(self) -> list[StoredEpisodes]:
        """Stored trajectories of each run."""
        return [read_episodes(run) for run in self.runs]

    @cached_property
    def episodes(self) -> StoredEpisodes:
        """Stored trajectories of all runs together."""
        return StoredEpisodes.together(self.episodes_by_run)

    def setting(self, key: str) -> Any:
        return self.runs[0].settings.get(key)


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Return the runs among and below `paths`, each once, sorted by name below each path. The models of an evaluation
    are not runs.

    Raises:
        UserError: A path does not exist, or holds no run.
    """
    found: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is no folder; give the folder of a run, or one that holds runs")
        below = [run for run in map(Run, library.find_runs(path, LEVELS)) if not run.dir.is_evaluation]
        below = [run for run in below if run.dir.metrics.is_file()]
        if not below:
            raise UserError(
                f"{path} holds no run (a folder with metrics.jsonl that is no evaluation), nor do the folders up to "
                f"{LEVELS} levels below it; give the run_dir of a training"
            )
        for run in below:
            found.setdefault(run.path.resolve(), run)
    return list(found.values())


def group_runs(runs: Sequence[Run]) -> list[SeedGroup]:
    """Return the groups in the order of their first runs, labelled by the settings that distinguish them."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(identity(run.settings), sort_keys=True, default=str), []).append(run)
    members = list(found.values())
    names = labels([identity(group[0].settings) for group in members])
    return [SeedGroup(name, tuple(group)) for name, group in zip(names, members, strict=True)]


def identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that define an experiment; 1.0 is converted to 1."""
    apart = tuple(f"{key}." for key in APART)
    return {key: _plain(value) for key, value in settings.items() if not f"{key}.".startswith(apart)}


def repeated_seeds(group: SeedGroup) -> list[tuple[Run, Run]]:
    """Return pairs of runs with the same settings and the same seed. They count twice and make the spread too small."""
    first: dict[Any, Run] = {}
    return [(first[run.seed], run) for run in group if first.setdefault(run.seed, run) is not run]


def labels(identities: Sequence[Settings]) -> list[str]:
    """Return a short label for each experiment: few differing keys that distinguish them, as `key=value`. Equal labels,
    as of long values that are cut to the same text, get a number.

    The label of a single experiment is its name.
    """
    if len(identities) == 1:
        return [one_line(identities[0].get("name", "run"), 40)]
    keys = distinguishing(identities)
    short = {key: NAMES.get(key, key.rpartition(".")[2]) for key in keys}
    words = {key: word if list(short.values()).count(word) == 1 else key for key, word in short.items()}
    found: list[str] = []
    for settings in identities:
        label = ", ".join(_word(words[key], settings.get(key)) for key in keys)
        found.append(next(name for n in count(1) if (name := label if n == 1 else f"{label} ({n})") not in found))
    return found


def distinguishing(identities: Sequence[Settings]) -> list[str]:
    """Choose the keys of the labels one by one: first keys of FIRST that distinguish any experiments, then the key that
    distinguishes most."""
    chosen: list[str] = []
    candidates = sorted(differing(identities), key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))
    while _kinds(identities, chosen) < len(identities):
        now = _kinds(identities, chosen)
        useful = [key for key in candidates if _kinds(identities, [*chosen, key]) > now]
        first = [key for key in useful if key in FIRST]
        best = first[0] if first else max(useful, key=lambda key: _kinds(identities, [*chosen, key]))
        chosen.append(best)
        candidates.remove(best)
    return chosen


def differing(identities: Sequence[Settings]) -> list[str]:
    """Return the keys whose values differ between the experiments, in the order of the configuration."""
    keys = list(dict.fromkeys(key for settings in identities for key in settings))
    return [key for key in keys if _kinds(identities, [key]) > 1]


def _kinds(identities: Sequence[Settings], keys: Sequence[str]) -> int:
    return len({json.dumps([settings.get(key) for key in keys], default=str) for settings in identities})


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _word(name: str, value: Any) -> str:
    return one_line(_text(value) if name == "name" else f"{name}={_text(value)}", 60)
