"""Makes ill runs, does what the diagnosis proposes first, and compares with going on unchanged.

    python experiments/healing/heal.py                  all cases of cases.yaml that are not in results.json yet
    python experiments/healing/heal.py --only hacked    one of them
    python experiments/healing/heal.py --report-only    only the table

A case is three runs. `ill`: the case's overrides. `healed`: the command that `python -m mtrl.diagnose` prints for it,
which is the same run from its beginning with the first proposed change. `control`: the ill run, gone on with for as
many steps again and nothing changed. Success is held out, greedy, by the scorer of the task.
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
from mtrl.tracking.files import replace_text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
GAIN = 0.2
"""A run has recovered if its held-out success is so much above the control's."""


@dataclass(frozen=True)
class Case:
    name: str
    ails: str
    """What is wrong, in words."""
    overrides: list[str]

    @classmethod
    def read(cls, path: Path) -> list[Case]:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        return [
            cls(name, case["ails"], [*content["common"], *case["overrides"]]) for name, case in content["cases"].items()
        ]


def examine(case: Case, root: Path) -> dict[str, Any]:
    """The three runs of a case, and what the diagnosis said between them."""
    ill, healed, control = (root / case.name / name for name in ("ill", "healed", "control"))
    run([sys.executable, "-m", "mtrl.main", *case.overrides], ill)
    told = diagnosis(ill)
    found: dict[str, Any] = {"ill": success(ill), "finding": None, "change": None, "healed": None, "control": None}
    if told["findings"]:
        found["finding"] = told["findings"][0]["rule"]
    if told["command"] is None:
        return found
    found["change"] = " ".join(told["findings"][0]["proposals"][0]["words"])
    run([sys.executable, *shlex.split(told["command"])[1:]], healed)
    steps = OmegaConf.load(ill / "config.yaml").trainer.max_steps
    if not control.exists():
        shutil.copytree(ill, control)
    words = [*case.overrides, "resume=latest", f"trainer.max_steps={2 * steps}"]
    run([sys.executable, "-m", "mtrl.main", *words], control)
    return found | {"healed": success(healed), "control": success(control)}


def run(command: list[str], run_dir: Path) -> None:
    """One run, unless it has ended. That it ends for want of a signal is one of the illnesses, and no failure."""
    done = run_dir.with_suffix(".done")
    if done.exists():
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, f"run_dir={run_dir}"], env=environment, capture_output=True, text=True)
    if ended.returncode and "max_steps_without_signal" not in ended.stdout + ended.stderr:
        raise SystemExit(f"{shlex.join(command)} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    done.touch()


def diagnosis(run_dir: Path) -> dict[str, Any]:
    """What `python -m mtrl.diagnose` says of a run."""
    command = [sys.executable, "-m", "mtrl.diagnose", str(run_dir), "--json", "-"]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
    return told


def success(run_dir: Path) -> float:
    """Held-out success at the end, greedy."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float([row["val/success/mean"] for row in rows if "val/success/mean" in row][-1])


def table(cases: list[Case], found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line per case, and how many recovered."""
    lines = [
        "| run | what ails it | first finding | first proposal | ill | control | healed | recovered |",
        "|---" * 8 + "|",
    ]
    recovered = total = 0
    for case in cases:
        if case.name not in found:
            continue
        was = found[case.name]
        well = was["healed"] is not None and was["healed"] - was["control"] >= GAIN
        recovered, total = recovered + well, total + 1
        change = f"`{was['change']}`" if was["change"] else "–"
        shares = ("–" if was[key] is None else f"{100 * was[key]:.3g} %" for key in ("ill", "control", "healed"))
        verdict = "yes" if well else "no"
        lines.append(f"| {case.name} | {case.ails} | {was['finding'] or '–'} | {change} | {' | '.join(shares)} | {verdict} |")
    return "\n".join(lines) + f"\n\n{recovered} of {total} recovered.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("outputs/experiments/healing"), help="folder of the runs")
    parser.add_argument("--only", help="the name of one case")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once, a core each")
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
