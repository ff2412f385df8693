"""Makes the ill and the healthy runs of `runs.yaml`, one after the other, and stores the data that the tests read.

    python experiments/diagnosis/record.py                  all runs that are not done yet
    python experiments/diagnosis/record.py --only hacked    one of the runs
    python experiments/diagnosis/record.py --keep-only      run nothing; store and draw the finished runs

`tests/diagnose/recorded/NAME` gets config.yaml, the rounded numbers of metrics.jsonl that do not depend on time, and a
few trajectories if the run has `trajectories` in `runs.yaml`: the number of trajectories of each file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from mtrl.config.plain_yaml import read_config
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.record import Record
from mtrl.diagnose.walk import walk
from mtrl.figures.plots import STYLE
from mtrl.record.run_dir import RunDir
from mtrl.scoring.agreement import Thresholds, TrajectoryAgreement
from mtrl.types import Trajectory, read_trajectories, write_jsonl

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "tests" / "diagnose" / "recorded"
LEFT_OUT = ("time/", "perf/tokens", "perf/cached", "analysis/mismatch/", "train/epoch", "policy/")
"""Beginnings of the names of metrics that no rule reads, or that depend on time."""
RARE = ("rollout/stop/", "val/stop/", "rollout/failed", "rollout/breaks", "analysis/staleness/", "analysis/set_aside")
"""Beginnings of the names of metrics that are left out of a run in which they are always 0."""
DIGITS = 4
"""Number of significant digits of a stored metric."""
CURVES = {
    "rollout/reward/mean": ("#0072B2", "reward"),
    "rollout/success/mean": ("#009E73", "success"),
    "analysis/zero_adv_frac": ("#D55E00", "groups without an advantage"),
}


@dataclass(frozen=True)
class Run:
    """A run to be recorded."""

    name: str
    overrides: list[str]
    shows: str
    """Illness or task of which the run is an example."""
    trajectories: int = 0
    """Number of lines that are stored of each file of trajectories."""
    files: list[str] = field(default_factory=list)
    """Globs of the stored files of trajectories."""

    def words(self, run_dir: Path) -> list[str]:
        """Return the command."""
        return [sys.executable, "-m", "mtrl.main", *self.overrides, f"run_dir={run_dir}"]


def read_runs(path: Path) -> list[Run]:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    common, tasks = content["common"], content["tasks"]
    return [
        Run(name, [*common, *tasks[run.pop("task")], *run.pop("overrides", [])], **run)
        for name, run in content["runs"].items()
    ]


def make(run: Run, run_dir: Path) -> None:
    """Make the run, unless it is done. A run that ends because it has no signal is an illness and not a failure."""
    if (run_dir / "metrics.jsonl").exists() and (run_dir / "done").exists():
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(run.words(run_dir), env=environment, capture_output=True, text=True)
    if done.returncode and "max_steps_without_signal" not in done.stdout + done.stderr:
        raise SystemExit(f"{run.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (run_dir / "done").touch()


def keep(run: Run, source: RunDir, target: RunDir) -> None:
    """Store the data that the tests read."""
    shutil.rmtree(target.path, ignore_errors=True)
    target.path.mkdir(parents=True)
    config = OmegaConf.load(source.config)
    config.run_dir = f"outputs/{run.name}"
    target.config.write_text(OmegaConf.to_yaml(config), encoding="utf-8")
    with target.metrics.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in trimmed(rows_of(source)))
    for pattern in run.files:
        for path in sorted(source.trajectories.glob(pattern)):
            target.trajectories.mkdir(exist_ok=True)
            write_jsonl(target.trajectories / path.name, telling(path, config, run.trajectories), mode="w")


def rows_of(run: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def trimmed(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the rows without metrics that no rule reads, with few digits, and with whole numbers as integers."""
    happened = {key for row in rows for key, value in row.items() if value or not key.startswith(RARE)}
    chosen = [{key: row[key] for key in row if key in happened and not key.startswith(LEFT_OUT)} for row in rows]
    return [{key: rounded(value) for key, value in row.items()} for row in chosen]


def rounded(value: float) -> float:
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def telling(path: Path, config: Any, count: int) -> Iterator[Trajectory]:
    """Yield `count` trajectories of a file. In half of them, if there are as many, reward and scorer disagree."""
    thresholds = Thresholds(config.evaluation.success_threshold, config.evaluation.success_threshold)
    found = list(read_trajectories(path))
    agreeing = [t for t in found if thresholds.verdict(t) is TrajectoryAgreement.AGREE]
    others = [t for t in found if thresholds.verdict(t) is not TrajectoryAgreement.AGREE]
    yield from others[: count - min(count // 2, len(agreeing))]
    yield from agreeing[: count // 2]


def live(run: RunDir) -> list[tuple[int, Finding]]:
    """Yield the findings that are new or got worse during the run, with their steps."""
    record, found = Record(read_config(run.config), run.path), []
    reported: dict[str, int] = {}
    for row in rows_of(run):
        record.add(row)
        for finding in walk(record).findings:
            if finding.severity.rank < reported.get(finding.rule, len(Severity)):
                reported[finding.rule] = finding.severity.rank
                found.append((record.step, finding))
    return found


def table(runs: list[Run]) -> str:
    """Return a Markdown table of the runs and their first findings."""
    lines = ["| run | reward | success | held out, greedy | first finding | reported at step |", "|---" * 6 + "|"]
    for run in runs:
        stored = RunDir(KEPT / run.name)
        rows = rows_of(stored)
        cells = [span(rows, key) for key in ("rollout/reward/mean", "rollout/success/mean", "val/success/mean")]
        first = next((f for f in walk(Record.load(stored.path)).findings if f.severity != Severity.NOTE), None)
        when = [step for step, f in live(stored) if first and (f.rule, f.severity) == (first.rule, first.severity)]
        finding_cell = f"{first.severity}: {first.rule}" if first else "none"
        lines.append(f"| `{run.name}` | {' | '.join(cells)} | {finding_cell} | {when[0] if when else '–'} |")
    return "\n".join(lines) + "\n"


def span(rows: list[dict[str, float]], key: str) -> str:
    """Return the means of the first, the best and the last three training steps, or single evaluations, as text."""
    values = [row[key] for row in rows if key in row]
    width = 1 if key.startswith("val/") else 3
    means = [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
    return f"{means[0]:.2f}, best {max(means):.2f}, last {means[-1]:.2f}"


def picture(runs: list[Run]) -> Figure:
    """Draw a panel for each stored run."""
    with matplotlib.rc_context(STYLE):
        columns = 3
        lines = -(-len(runs) // columns)
        figure = Figure(figsize=(14, 3.1 * lines), layout="constrained")
        panels = list(figure.subplots(lines, columns).flat)
        for run, axes in zip(runs, panels, strict=False):
            rows = rows_of(RunDir(KEPT / run.name))
            for key, (colour, _) in CURVES.items():
                steps = [row["step"] for row in rows if key in row]
                axes.plot(steps, [row[key] for row in rows if key in row], color=colour, linewidth=1.4)
            held_out = [row for row in rows if "val/success/mean" in row]
            axes.plot(
                [row["step"] for row in held_out],
                [row["val/success/mean"] for row in held_out],
                "o:",
                color=CURVES["rollout/success/mean"][0],
                markersize=5,
            )
            axes.set_title(f"{run.name}: {run.shows}", fontsize=10)
            axes.set_ylim(-0.03, 1.03)
        for axes in panels[len(runs) :]:
            axes.set_visible(False)
        labels = [*(label for _, label in CURVES.values()), "success, held out, greedy"]
        lines_drawn = [*panels[0].lines[: len(CURVES)], panels[0].lines[-1]]
        figure.legend(lines_drawn, labels, loc="outside lower center", ncols=len(labels))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("outputs/experiments/diagnosis"), help="folder of the runs")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--keep-only", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    runs = read_runs(HERE / "runs.yaml")
    for run in runs:
        if arguments.only and run.name not in arguments.only:
            continue
        run_dir = arguments.root / run.name
        if not arguments.keep_only:
            make(run, run_dir)
        if (run_dir / "metrics.jsonl").exists():
            keep(run, RunDir(run_dir), RunDir(KEPT / run.name))
            print(f"{run.name}: stored", flush=True)
    drawn = [run for run in runs if (KEPT / run.name / "metrics.jsonl").exists()]
    picture(drawn).savefig(HERE / "curves.png", dpi=100)
    print(table(drawn))


if __name__ == "__main__":
    main()
