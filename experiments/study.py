"""Runs a study: every arm with every seed, then the table and the picture.

    python experiments/study.py experiments/credit/study.yaml

A study is a YAML file: `common` overrides, `seeds`, and `arms`, each a list of overrides by name. Runs that have a
summary.json are not repeated; `--report-only` draws from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from omegaconf import OmegaConf

from mtrl.tracking.plots import STYLE

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#777777", "#E69F00")
DASHES = ("-", "--", ":", "-.")
WINDOW = 10
"""Steps of the moving average in the picture."""

PANELS = (
    ("rollout/success/mean", "success of training rollouts"),
    ("analysis/zero_adv_frac", "share of groups without an advantage"),
    ("analysis/informative_groups", "informative groups per step"),
    ("rollout/turns/mean", "turns per episode"),
)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Study:
    name: str
    common: list[str]
    seeds: list[int]
    arms: dict[str, list[str]]
    folder: Path

    @classmethod
    def read(cls, path: Path) -> Study:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return cls(path.parent.name, content["common"], content["seeds"], content["arms"], path.parent)

    def run_dir(self, root: Path, arm: str, seed: int) -> Path:
        return root / self.name / re.sub(r"\W+", "_", arm) / f"seed{seed}"


def over_steps(key: str) -> Callable[[Rows, dict[str, Any]], float]:
    """The mean of a metric over all training steps."""
    return lambda rows, summary: fmean(row[key] for row in rows if key in row)


COLUMNS: dict[str, Callable[[Rows, dict[str, Any]], float]] = {
    "greedy before": lambda rows, summary: summary["success_before"],
    "greedy after": lambda rows, summary: summary["success_after"],
    "sampled before": lambda rows, summary: summary["success_sampled_before"],
    "sampled after": lambda rows, summary: summary["success_sampled_after"],
    "success over training": over_steps("rollout/success/mean"),
    "zero-advantage share": over_steps("analysis/zero_adv_frac"),
    "informative groups": over_steps("analysis/informative_groups"),
    "largest drift of a log-prob": lambda rows, summary: max(r.get("analysis/logprob_drift/max", 0.0) for r in rows),
    "turns at the end": lambda rows, summary: fmean([r["rollout/turns/mean"] for r in rows if "train/loss" in r][-5:]),
}
"""What the table shows: a number per run from its metrics and its summary."""


def run(study: Study, root: Path, jobs: int) -> None:
    """Run what has not been run; raises if a run fails."""
    todo = [(arm, seed) for seed in study.seeds for arm in study.arms]

    def one(arm_and_seed: tuple[str, int]) -> None:
        arm, seed = arm_and_seed
        run_dir = study.run_dir(root, arm, seed)
        if (run_dir / "summary.json").exists():
            return
        words = [*study.common, *study.arms[arm], f"seed={seed}", f"run_dir={run_dir}", "tracker.plots=false"]
        if run_dir.exists():  # it was interrupted
            words.append("resume=latest")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "mtrl.main", *words], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        print(f"{arm}, seed {seed}: done", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, todo))


def results(study: Study, root: Path) -> dict[str, dict[str, list[float]]]:
    """By arm and column one number per seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for arm in study.arms:
        runs = [read(study.run_dir(root, arm, seed)) for seed in study.seeds]
        found[arm] = {name: [float(f"{column(*run):.4g}") for run in runs] for name, column in COLUMNS.items()}
    return found


def read(run_dir: Path) -> tuple[Rows, dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((run_dir / "summary.json").read_text())


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: the mean over seeds, and each seed in brackets."""
    lines = [f"| arm | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for arm, columns in found.items():
        cells = [
            f"{fmean(values):.3g} ({', '.join(f'{value:.3g}' for value in values)})" for values in columns.values()
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(study: Study, root: Path) -> Figure:
    """One panel per metric and one line per run, smoothed: the colour is the arm, the dashes are the seed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 4.2), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for colour, arm in zip(PALETTE, study.arms, strict=False):
            for dashes, seed in zip(DASHES, study.seeds, strict=False):
                rows, _ = read(study.run_dir(root, arm, seed))
                for axes, (key, _) in zip(panels, PANELS, strict=True):
                    values = smooth([row[key] for row in rows if key in row])
                    axes.plot(range(1, len(values) + 1), values, dashes, color=colour, linewidth=1.5)
        for axes, (_, title) in zip(panels, PANELS, strict=True):
            axes.set_title(title)
            axes.set_xlabel("step")
            axes.set_ylim(bottom=0)
        arms = [Line2D([], [], color=colour) for colour, _ in zip(PALETTE, study.arms, strict=False)]
        seeds = [Line2D([], [], color="#555555", linestyle=d) for d, _ in zip(DASHES, study.seeds, strict=False)]
        names = [*study.arms, *(f"seed {seed}" for seed in study.seeds)]
        figure.legend([*arms, *seeds], names, loc="outside lower center", ncols=len(names))
    return figure


def smooth(values: Sequence[float]) -> np.ndarray:
    """The mean of the last `WINDOW` values at each place."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--root", type=Path, default=Path("outputs/experiments"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, a core each")
    parser.add_argument("--report-only", action="store_true", help="draw from the runs that are there")
    arguments = parser.parse_args()
    study = Study.read(arguments.study)
    if not arguments.report_only:
        run(study, arguments.root, arguments.jobs)
    found = results(study, arguments.root)
    (study.folder / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    picture(study, arguments.root).savefig(study.folder / "curves.png", dpi=110)
    print(table(found))


if __name__ == "__main__":
    main()
