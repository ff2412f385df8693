"""The command line of the self-test. This module does not import torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.text import Text

from mtrl.doctor import checks, machine
from mtrl.doctor.self_test.bench import CPU, GPU, QUICK, Bench
from mtrl.doctor.self_test.case import CASES, MODEL, Case
from mtrl.doctor.self_test.outcome import CaseResult
from mtrl.doctor.self_test.process import run_case
from mtrl.doctor.self_test.recommend import RecommendedSetting, recommend
from mtrl.errors import UserError
from mtrl.preflight import checklist_table
from mtrl.preflight.result import Status, skipped, worst
from mtrl.utils.files import in_home
from mtrl.utils.signals import Interrupt

FORMAT = 1
"""Version of the JSON file."""
OPTION = "--self-test"
LIMIT = 600.0
"""Time limit of all cases together, in seconds."""
JSON = Path("outputs") / "self_test.json"
PACKAGES = ("torch", "transformers", "flash-attn")
ENGINES = ("vllm", "sglang")
DESCRIPTION = """Run each part of a training run on this machine, check it and measure it, in ten
minutes at most: sampling, updates, sharding, checkpoints, weight sync, and vLLM
and SGLang if they are installed.

The model has random weights in the shapes of Qwen3-0.6B, or is small on a CPU;
nothing is downloaded. Each part runs in a process of its own: a crash or a hang
costs one line. The exit status is 1 if a part failed."""


Gpus = Sequence[tuple[str, int]]
"""Name and memory, in bytes, of each GPU."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: `model.path` is not a folder with a model, or another key is given.
    """
    parser = argparse.ArgumentParser(
        prog=f"mtrl doctor {OPTION}",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(OPTION, action="store_true", required=True, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", metavar="model.path=FOLDER", help="a model with its own weights instead")
    parser.add_argument("--quick", action="store_true", help="the smallest shapes, also on a GPU")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="results as JSON (%(default)s)")
    args = parser.parse_args(words)
    args.plan = False
    if args.model is not None:
        key, _, folder = args.model.partition("=")
        if key != "model.path":
            raise UserError(f"{args.model} is not a setting of the self-test; it takes model.path=FOLDER only")
        if not (in_home(folder) / "config.json").is_file():
            raise UserError(f"model.path={folder} has no config.json; name the folder of a causal LM")
        args.model = str(in_home(folder).absolute())
    return args


def self_test(args: argparse.Namespace, cases: Sequence[Case] = CASES) -> int:
    """Run the cases, print a line for each, and write the JSON file. Return the exit status.

    Raises:
        UserError: PyTorch cannot be used, or the JSON file cannot be written.
        SystemExit: a signal asked the program to stop.
    """
    try:
        gpus = machine.ask_torch().gpus
    except RuntimeError as error:
        raise UserError(f"PyTorch cannot be used: {error}; mtrl doctor names the fix") from None
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.open("a", encoding="utf-8").close()  # a file that cannot be written is an error before the first case
    except OSError as error:
        raise UserError(f"--json {args.json} cannot be written ({error.strerror}); name another file") from None
    temporary = tempfile.TemporaryDirectory(prefix="mtrl-self-test-", ignore_cleanup_errors=True)
    with Interrupt() as interrupt, temporary as folder:
        bench = Bench(
            model=args.model or str(Path(folder) / "model"),
            sizes=QUICK if args.quick else GPU if gpus else CPU,
            gpus=len(gpus),
            scratch=folder,
        )
        print_start(args.model, gpus)
        outcomes: dict[str, CaseResult] = {}
        try:
            run_cases(bench, cases if args.model else (MODEL, *cases), interrupt, outcomes)
        finally:  # a signal leaves the results so far
            settings = recommend(outcomes, gpus[0][1] if gpus else 0)
            document = to_json(args.model, bench, gpus, outcomes, settings)
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print_end(outcomes, settings, args.json)
    return int(worst([outcome.result for outcome in outcomes.values()]) == Status.FAIL)


def run_cases(bench: Bench, cases: Sequence[Case], interrupt: Interrupt, outcomes: dict[str, CaseResult]) -> None:
    """Run the cases one after another, print the line of each as it ends, and add its outcome to `outcomes`. Without a
    model all others are skipped.

    Raises:
        SystemExit: a signal asked the program to stop; the processes of the running case are killed first.
    """
    screen, end = checklist_table.console(), time.monotonic() + LIMIT
    for case in cases:
        left = end - time.monotonic()
        waiting = screen.status(case.name) if screen.is_terminal else nullcontext()
        with waiting:
            if MODEL.name in outcomes and not outcomes[MODEL.name].passed:
                outcome = _left_out(case, "the model could not be built")
            elif left <= 0:
                outcome = _left_out(case, f"the {LIMIT / 60:.0f} minutes of the self-test are over")
            else:
                outcome = run_case(case, bench, min(case.seconds, left), interrupt)
        if interrupt.requested:
            raise SystemExit(f"the self-test was stopped by {interrupt.requested} in {case.name}")
        outcomes[case.name] = outcome
        screen.print(checklist_table.table([outcome.result]))


def _left_out(case: Case, reason: str) -> CaseResult:
    return CaseResult(replace(skipped(reason), name=case.name))


def print_start(model: str | None, gpus: Gpus) -> None:
    names = ", ".join(dict.fromkeys(name for name, _ in gpus))
    where = f"{len(gpus)} x {names}" if gpus else "the CPU"
    what = f"model {model}" if model else "random weights"
    checklist_table.console().print(f"self-test on {where}, {what}; ten minutes at most\n", soft_wrap=True)


def print_end(outcomes: dict[str, CaseResult], settings: Sequence[RecommendedSetting], file: Path) -> None:
    screen = checklist_table.console()
    results = [outcome.result for outcome in outcomes.values()]
    screen.print()
    if settings:
        screen.print("recommended, from these measurements:")
        for setting in settings:
            screen.print(Text(f"  {setting.key}={setting.value}"))
            screen.print(Text(f"      {setting.reason}", style="dim"))
        screen.print()
    screen.print(checklist_table.verdict(results))
    screen.print(f"all figures: {file}", soft_wrap=True)


def to_json(
    model: str | None, bench: Bench, gpus: Gpus, outcomes: dict[str, CaseResult], settings: Sequence[RecommendedSetting]
) -> dict[str, Any]:
    """Return the content of the JSON file; `model` is null for random weights."""
    results = [outcome.result for outcome in outcomes.values()]
    return {
        "name": "self-test",
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "status": worst(results),
        "machine": {
            "gpus": [{"name": name, "bytes": size} for name, size in gpus],
            "host": checks.host().evidence,
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "engines": {name: checks.engine(name)().evidence for name in ENGINES},
        },
        "model": model,
        "sizes": asdict(bench.sizes),
        "checks": [asdict(outcome.result) | {"figures": outcome.figures} for outcome in outcomes.values()],
        "recommended": [asdict(setting) for setting in settings],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
