"""Makes ill runs, repeats each with the first change that the diagnosis proposes, and compares with a control.

    python -m experiments.healing.heal                  all cases of cases.yaml that are not in results.json yet
    python -m experiments.healing.heal --only hacked    one case
    python -m experiments.healing.heal --report-only    only the table

A case has three runs. `ill` has the overrides of the case. `healed` is the command that `mtrl diagnose`
prints: the same run from its beginning with the first proposed change. Where the diagnosis proposes to fix the reward,
which is not a setting, it is the same run with the task `mended` of the case. `control` continues the ill run
unchanged for as many steps again. Success is measured on held-out rows, greedy, by the scorer of the task.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.study import show_table
from mtrl.utils.files import replace_text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
GAIN = 0.2
"""A run has recovered if its held-out success exceeds the control's by this much. If the control exceeds the ill run by
this much, the run only needed time, and it is not counted."""


@dataclass(frozen=True)
class Case:
    name: str
    ails: str
    """The fault in words."""
    overrides: list[str]
    mended: list[str] | None
    """Overrides that fix the reward, if the diagnosis proposes that."""

    @classmethod
    def read(cls, path: Path) -> list[Case]:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return [
            cls(name, case["ails"], [*content["common"], *case["overrides"]], case.get("mended"))
            for name, case in content["cases"].items()
        ]


def examine(case: Case, root: Path) -> dict[str, Any]:
    """Make the three runs of a case, and diagnose the first."""
    ill, healed, control = (root / case.name / name for name in ("ill", "healed", "control"))
    main = [sys.executable, "-m", "mtrl.main", *case.overrides]
    run(main, ill)
    if not control.exists():
        shutil.copytree(ill, control)
    steps = OmegaConf.load(ill / "config.yaml").trainer.max_steps
    run([*main, "resume=latest", f"trainer.max_steps={2 * steps}"], control)
    found: dict[str, Any] = {
        "ill": success(ill),
        "control": success(control),
        "finding": None,
        "change": None,
        "healed": None,
    }
    result = diagnosis(ill)
    if not result["findings"]:
        return found
    first = result["findings"][0]
    words = first["proposals"][0]["words"] if first["proposals"] else None
    if words is None and "reward" in first["advice"]:
        words = case.mended
    if words is None:
        return found | {"finding": first["rule"]}
    # The diagnosis prints a command for an alarm or a warning, and none for the change of a note.
    again = [sys.executable, *shlex.split(result["command"])[1:]] if result["command"] else [*main, *words]
    run(again, healed)
    return found | {"finding": first["rule"], "change": " ".join(words), "healed": success(healed)}


def run(command: list[str], run_dir: Path) -> None:
    """Make one run, unless it is done. A run that ends because it has no signal is an illness and not a failure."""
    done = run_dir.with_suffix(".done")
    if done.exists():
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, f"run_dir={run_dir}"], env=environment, capture_output=True, text=True)
    if ended.returncode and "max_steps_without_signal" not in ended.stdout + ended.stderr:
        raise SystemExit(f"{shlex.join(command)} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    done.touch()


def diagnosis(run_dir: Path) -> dict[str, Any]:
    """Return the JSON of `mtrl diagnose` for a run."""
    command = [sys.executable, "-m", "mtrl.diagnose", str(run_dir), "--json", "-"]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
    return result


def success(run_dir: Path) -> float:
    """Return the held-out success at the end, greedy."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row["val/success/mean"] for row in rows if "val/success/mean" in row][-1])


def verdict(was: dict[str, Any]) -> str:
    """Return `yes`, `no` or `only took time`, by the held-out success of the three runs of a case."""
    if was["control"] - was["ill"] >= GAIN:
        return "only took time"
    return "yes" if was["healed"] is not None and was["healed"] - was["control"] >= GAIN else "no"


def table(cases: list[Case], found: dict[str, dict[str, Any]]) -> str:
    """Return Markdown with a row per case, and the number of cases that recovered."""
    titles = ("run", "fault", "first finding", "first change", "ill", "control", "healed", "recovered")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    verdicts = {case.name: verdict(found[case.name]) for case in cases if case.name in found}
    for case in cases:
        if case.name in verdicts:
            was = found[case.name]
            change = f"`{was['change']}`" if was["change"] else "–"
            shares = ("–" if was[key] is None else f"{100 * was[key]:.3g} %" for key in ("ill", "control", "healed"))
            cells = (case.name, case.ails, was["finding"] or "–", change, *shares, verdicts[case.name])
            lines.append(f"| {' | '.join(cells)} |")
    counted = [each for each in verdicts.values() if each in ("yes", "no")]
    recovered, ill = counted.count("yes"), len(counted)
    return "\n".join(lines) + f"\n\n{recovered} of {ill} ill runs recovered.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("outputs/experiments/healing"), help="folder of the runs")
    parser.add_argument("--only", help="the name of one case")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time, one core for each")
    parser.add_argument("--report-only", action="store_true")
    arguments = parser.parse_args()
    cases, lock = Case.read(HERE / "cases.yaml"), threading.Lock()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def one(case: Case) -> None:
        outcome = examine(case, arguments.root)
        with lock:
            found[case.name] = outcome
            replace_text(RESULTS, json.dumps(found, indent=1) + "\n")
        print(case.name, outcome, flush=True)

    if not arguments.report_only:
        todo = [case for case in cases if arguments.only in (None, case.name) and case.name not in found]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(one, todo))
    show_table(HERE / "README.md", table(cases, found))
    print(table(cases, found))


if __name__ == "__main__":
    main()
