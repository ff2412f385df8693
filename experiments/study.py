"""Runs a study: every arm with every seed, then the table and the picture.

    python experiments/study.py experiments/seeds/study.yaml

A study is a YAML file: `common` overrides, `seeds` (a list, or a range such as 100-139), and `arms`, each a list of
overrides by name, or `{overrides: […], seeds: …}` for an arm with its own seeds. `columns` has the columns of the
table, and `picture` is `curves` (metrics over steps) or `seeds` (success before and after, a dot per seed). `pages` are
other Markdown files of the project, each with the arms of its own short table. Each of `pairs` is two arms, whose
difference over the same seeds is in a second table.

The numbers of a run are added to results.json when it ends, and a run with numbers is not repeated, so that a stopped
study can be continued. To start again, delete results.json. `--report-only` draws from the numbers in results.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median, stdev
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from mtrl.figures.plots import STYLE
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import replace_text

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#777777", "#E69F00", "#56B4E9")
WINDOW = 10
"""Number of steps of the moving average in the picture."""
PANELS = (
    ("rollout/success/mean", "success of training rollouts"),
    ("analysis/zero_adv_frac", "share of groups without an advantage"),
    ("analysis/informative_groups", "informative groups per step"),
    ("rollout/turns/mean", "turns per episode"),
)
RATES = ("greedy", "sampled", "success", "zero-advantage", "held out")
"""Beginnings of the names of columns with shares, which are shown in percent."""
SMALLER_IS_WORSE = ("success", "reward", "greedy", "sampled", "informative", "held out")
MARKS = ("<!-- table -->", "<!-- /table -->")
"""Marks before and after the table in the README of a study, and the short table of another page."""
SHORT = ("sampled before", "greedy after", "sampled after")
"""Columns of a short table."""

Rows = list[dict[str, Any]]
Found = dict[str, dict[str, dict[str, float | None]]]
"""Arm -> seed -> column -> value."""


@dataclass(frozen=True)
class Arm:
    name: str
    overrides: list[str]
    seeds: list[int]


@dataclass(frozen=True)
class Study:
    name: str
    common: list[str]
    arms: list[Arm]
    columns: list[str]
    picture: str
    pages: dict[str, list[str]]
    pairs: list[list[str]]
    folder: Path

    @classmethod
    def read(cls, path: Path) -> Study:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        common_seeds = content.get("seeds", [])
        arms = []
        for name, value in content["arms"].items():
            spec = value if isinstance(value, dict) else {"overrides": value}
            arms.append(Arm(name, spec.get("overrides") or [], seeds_of(spec.get("seeds", common_seeds))))
        columns = content.get("columns", [name for name in COLUMNS if name not in RARE])
        picture = content.get("picture", "curves")
        pages = content.get("pages", {})
        pairs = content.get("pairs", [])
        return cls(path.parent.name, content.get("common", []), arms, columns, picture, pages, pairs, path.parent)

    def run_dir(self, root: Path, arm: Arm, seed: int) -> Path:
        return root / self.name / re.sub(r"\W+", "_", arm.name) / f"seed{seed}"

    @property
    def results(self) -> Path:
        return self.folder / "results.json"


def seeds_of(value: Any) -> list[int]:
    """Return the seeds of a list such as `[3, 4]`, or of a range such as `100-139` with both ends."""
    if isinstance(value, str):
        first, _, last = value.partition("-")
        return list(range(int(first), int(last or first) + 1))
    return [int(seed) for seed in ([value] if isinstance(value, int) else value)]


def over_steps(key: str) -> Callable[[Rows, dict[str, Any]], float | None]:
    """Return a column with the mean of a metric over all training steps."""
    return lambda rows, summary: fmean(values) if (values := [row[key] for row in rows if key in row]) else None


def steps_to(value: float, key: str) -> Callable[[Rows, dict[str, Any]], float | None]:
    """Return a column with the first step at which the moving average of a metric reaches `value`; the last step plus 1
    if it never does."""

    def first(rows: Rows, summary: dict[str, Any]) -> float:
        values = smooth([row[key] for row in rows if key in row])
        reached = np.flatnonzero(values >= value)
        return float(reached[0] + 1 if len(reached) else len(values) + 1)

    return first


def evaluated_steps_to(value: float, key: str) -> Callable[[Rows, dict[str, Any]], float | None]:
    """Return a column with the number of training steps at the first evaluation whose metric reaches `value`; that of
    the last evaluation plus 1 if none does, and None without evaluations."""

    def first(rows: Rows, summary: dict[str, Any]) -> float | None:
        evaluated = [(row["step"], row[key]) for row in rows if key in row]
        reached = [step for step, found in evaluated if found >= value]
        return float(min(reached, default=evaluated[-1][0] + 1)) if evaluated else None

    return first


COLUMNS: dict[str, Callable[[Rows, dict[str, Any]], float | None]] = {
    "greedy before": lambda rows, summary: summary["success_before"],
    "greedy after": lambda rows, summary: summary["success_after"],
    "sampled before": lambda rows, summary: summary["success_sampled_before"],
    "sampled after": lambda rows, summary: summary["success_sampled_after"],
    "success over training": over_steps("rollout/success/mean"),
    "steps to 90 %": steps_to(0.9, "rollout/success/mean"),
    "reward over training": over_steps("rollout/reward/mean"),
    "steps to a reward of 0.9": steps_to(0.9, "rollout/reward/mean"),
    "held out over training": over_steps("val/success/mean"),
    "steps to 90 % held out": evaluated_steps_to(0.9, "val/success/mean"),
    "steps to 97 % held out": evaluated_steps_to(0.97, "val/success/mean"),
    "zero-advantage share": over_steps("analysis/zero_adv_frac"),
    "informative groups": over_steps("analysis/informative_groups"),
    "largest drift of a log-prob": lambda rows, summary: max(r.get("analysis/logprob_drift/max", 0.0) for r in rows),
    "turns at the end": lambda rows, summary: fmean([r["rollout/turns/mean"] for r in rows if "train/loss" in r][-5:]),
    "whole command, CPU-seconds": lambda rows, summary: summary.get("cpu_seconds"),
}
"""Columns of the table: each computes a number of a run from its metrics and its summary."""
RARE = (
    *("steps to 90 %", "reward over training", "steps to a reward of 0.9", "whole command, CPU-seconds"),
    *("held out over training", "steps to 90 % held out", "steps to 97 % held out"),
)
"""Columns that a study has only if its `columns` names them."""


def run(study: Study, root: Path, jobs: int) -> None:
    """Run all seeds without numbers, seed by seed over all arms, and add the numbers; exits if a run fails."""
    lock, found = threading.Lock(), known(study)
    depth = max(len(arm.seeds) for arm in study.arms)
    todo = [(arm, arm.seeds[i]) for i in range(depth) for arm in study.arms if i < len(arm.seeds)]

    def one(arm: Arm, seed: int) -> None:
        run_dir = study.run_dir(root, arm, seed)
        cpu_seconds = None if has_ended(run_dir) else train(study, arm, seed, run_dir)
        rows, summary = read(run_dir)
        columns = {name: column(rows, {**summary, "cpu_seconds": cpu_seconds}) for name, column in COLUMNS.items()}
        rounded = {name: None if value is None else float(f"{value:.4g}") for name, value in columns.items()}
        with lock:
            found.setdefault(arm.name, {})[str(seed)] = rounded
            replace_text(study.results, json.dumps(found, indent=1) + "\n")
        print(
            f"{arm.name}, seed {seed}: greedy {rounded['greedy after']}, sampled {rounded['sampled after']}", flush=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda pair: one(*pair), [p for p in todo if str(p[1]) not in found.get(p[0].name, {})]))


def has_ended(run_dir: Path) -> bool:
    """Return whether a run made all of its steps; a run that a signal stopped has a summary too."""
    status = RunDir(run_dir).status
    return status.exists() and status.read_text(encoding="utf-8").strip() == "finished"


def train(study: Study, arm: Arm, seed: int, run_dir: Path) -> float | None:
    """Run one seed in a process of its own. Return its CPU-seconds, or None if an earlier process began it."""
    words = [*study.common, *arm.overrides, f"seed={seed}", f"run_dir={run_dir}", "tracker.plots=false"]
    if is_begun := run_dir.exists():
        words.append("resume=latest")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", "mtrl.main", *words]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arm.name}, seed {seed} failed:\n{log.read_text()[-2000:]}")
    return None if is_begun else usage.ru_utime + usage.ru_stime


def known(study: Study) -> Found:
    """Return the numbers of the runs that have ended."""
    return json.loads(study.results.read_text()) if study.results.exists() else {}


def read(run_dir: Path) -> tuple[Rows, dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((run_dir / "summary.json").read_text())


def table(study: Study, found: Found) -> str:
    """Return Markdown with a row per arm and column: n, median, worst, best, and the mean with its 95 % interval."""
    lines = ["| arm | | n | median | worst | best | mean |", "|---" * 7 + "|"]
    for arm in study.arms:
        for column in study.columns:
            if values := values_of(found, arm.name, column):
                lines.append(f"| {arm.name} | {column} | {' | '.join(statistics(column, values))} |")
    return "\n".join(lines) + "\n" + paired_table(study, found)


def paired_table(study: Study, found: Found) -> str:
    """Return Markdown with a row per pair of arms and column, or nothing without pairs: the mean difference over the
    same seeds, its 95 % interval by Student's t, and the number of seeds on which the first arm is better."""
    if not study.pairs:
        return ""
    lines = ["", "| difference on the same seeds | | n | mean | better on |", "|---" * 5 + "|"]
    for first, second in study.pairs:
        for column in study.columns:
            ours, theirs = found.get(first, {}), found.get(second, {})
            pairs = [(ours[seed][column], theirs[seed][column]) for seed in ours if seed in theirs]
            differences = [a - b for a, b in pairs if a is not None and b is not None]
            if len(differences) > 1:
                sign = 1 if column.startswith(SMALLER_IS_WORSE) else -1
                wins = sum(sign * difference > 0 for difference in differences)
                mean = statistics(column, differences)[-1].replace(" %", " points")
                lines.append(f"| {first} − {second} | {column} | {len(differences)} | {mean} | {wins} |")
    return "\n".join(lines) + "\n"


def short_table(found: Found, arms: Sequence[str]) -> str:
    """Return Markdown with a row per arm; each column has the median and, in brackets, the worst and the best."""
    lines = [f"| task | seeds | {' | '.join(SHORT)} |", "|---" * (2 + len(SHORT)) + "|"]
    for arm in arms:
        cells = [statistics(column, values_of(found, arm, column)) for column in SHORT]
        shown = (f"{middle} ({worst} to {best})" for _, middle, worst, best, _ in cells)
        lines.append(f"| {arm} | {cells[0][0]} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def tables(study: Study, found: Found) -> dict[Path, str]:
    """Return the table of each page, by its path."""
    short = {Path(page): short_table(found, arms) for page, arms in study.pages.items()}
    return {study.folder / "README.md": table(study, found), **short}


def values_of(found: Found, arm: str, column: str) -> list[float]:
    return [value for run in found.get(arm, {}).values() if (value := run.get(column)) is not None]


def statistics(column: str, values: Sequence[float]) -> list[str]:
    """Return n, median, worst, best and mean ± half of its 95 % interval by Student's t; dashes without values."""
    if not values:
        return ["0", *4 * ["–"]]
    unit, scale = (" %", 100) if column.startswith(RATES) else ("", 1)
    values = [scale * value for value in values]
    low, high = min(values), max(values)
    worst, best = (low, high) if column.startswith(SMALLER_IS_WORSE) else (high, low)
    shown = [f"{value:.3g}{unit}" for value in (median(values), worst, best)]
    mean = f"{fmean(values):.3g}{unit}"
    if len(values) > 1:
        half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        mean = f"{fmean(values):.3g} ± {half:.2g}{unit}"
    return [str(len(values)), *shown, mean]


def show_table(readme: Path, text: str) -> None:
    """Write the table between the marks of a README, if it has marks."""
    before, mark, rest = (readme.read_text(encoding="utf-8") if readme.exists() else "").partition(MARKS[0])
    if mark:
        replace_text(readme, f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by Hill's expansion around the normal quantile (1970, CACM 396). Its
    error is less than 0.5 % from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.975)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def picture(study: Study, root: Path, found: Found) -> Figure:
    with matplotlib.rc_context(STYLE):
        return seeds_picture(study, found) if study.picture == "seeds" else curves_picture(study, root)


def seeds_picture(study: Study, found: Found) -> Figure:
    """Draw one column per arm with a dot per seed, hollow before training and full after it."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("greedy", "sampled"), strict=True):
        for place, arm in enumerate(study.arms):
            runs = list(found.get(arm.name, {}).values())
            across = place + np.linspace(-0.3, 0.3, max(len(runs), 1))[: len(runs)]
            before, after = ([100 * run[f"{kind} {when}"] for run in runs] for when in ("before", "after"))
            axes.scatter(across, before, s=14, facecolors="none", edgecolors=PALETTE[place % len(PALETTE)])
            axes.scatter(across, after, s=14, color=PALETTE[place % len(PALETTE)])
        names = [arm.name.replace(", ", ",\n", 1) for arm in study.arms]
        counts = [len(found.get(arm.name, {})) for arm in study.arms]
        axes.set_xticks(range(len(names)), [f"{name}\nn = {n}" for name, n in zip(names, counts, strict=True)])
        axes.set_title(f"{kind} success, %: hollow before training, full after it")
        axes.set_ylim(-3, 103)
    return figure


def curves_picture(study: Study, root: Path) -> Figure:
    """Draw one panel per metric and one line per arm: the mean over the seeds whose runs are in `root`, and a band from
    the lowest to the highest seed, smoothed over steps."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    for colour, arm in zip(PALETTE * 3, study.arms, strict=False):
        folders = [study.run_dir(root, arm, seed) for seed in arm.seeds]
        runs = [read(folder)[0] for folder in folders if has_ended(folder)]
        for axes, (key, _) in zip(panels, PANELS, strict=True):
            curves = [smooth([row[key] for row in rows if key in row]) for rows in runs]
            length = min(map(len, curves), default=0)
            if length:
                stacked, steps = np.array([curve[:length] for curve in curves]), range(1, length + 1)
                axes.plot(steps, stacked.mean(axis=0), color=colour, linewidth=1.8, label=arm.name)
                axes.fill_between(steps, stacked.min(axis=0), stacked.max(axis=0), color=colour, alpha=0.12)
    for axes, (_, title) in zip(panels, PANELS, strict=True):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=max(len(labels), 1))
    return figure


def smooth(values: Iterable[float]) -> np.ndarray:
    """Return the mean of the last `WINDOW` values at each place."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--root", type=Path, default=Path("outputs/experiments"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core for each")
    parser.add_argument("--report-only", action="store_true", help="run nothing, draw from results.json")
    arguments = parser.parse_args()
    study, begun = Study.read(arguments.study), time.monotonic()
    if not arguments.report_only:
        run(study, arguments.root, arguments.jobs)
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
    found = known(study)
    if study.picture == "seeds" or (arguments.root / study.name).is_dir():  # curves need the folders of the runs
        picture(study, arguments.root, found).savefig(study.folder / f"{study.picture}.png", dpi=110)
    for page, text in tables(study, found).items():
        show_table(page, text)
    print(table(study, found))


if __name__ == "__main__":
    main()
