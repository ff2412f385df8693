"""Seconds until a command has ended, and seconds until a run has trained its first step.

    python benchmarks/start.py                          this checkout
    python benchmarks/start.py --trees OLD .            two checkouts, alternately, with ratios
    python benchmarks/start.py --only help "wrong key"  some of the commands
    python benchmarks/start.py --no-step --rounds 5

Each row is a process of its own, started as a user starts it, with its wall seconds and the CPU seconds of all its
threads and children. The table has the minimum of the rounds, since other work on the machine only adds time. A first
round, which is not counted, writes Python's bytecode, fills the cache of the disk and makes the tiny policy in
`MTRL_CACHE`, so that all measured processes start warm.

The first step is that of `experiment=gsm8k`, including its evaluation before training. The table has the times of the
moments that the run reports: the configuration is composed, the data are loaded and checked, the policy and the engine
are set up, the evaluation has ended, and the row of step 1 is in metrics.jsonl. The imports that every run needs are
measured by themselves.

The exit status is 1 if a command ended with an unexpected status.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bounds import check_sizes

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1800
"""Time limit of one process, in seconds. The first process may have to make the tiny policy."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Command:
    """Arguments of `python`, and the expected exit status."""

    name: str
    words: tuple[str, ...]
    status: int = 0
    target: float | None = None
    """Wall seconds that the command should take at most."""


PROGRAMS = ("doctor", "view", "evaluate", "play", "preflight", "gateway", "diagnose", "figures")
COMMANDS = (
    Command("python", ("-c", "pass")),
    Command("help", ("-m", "mtrl.main", "--help"), target=1.5),
    Command("cfg", ("-m", "mtrl.main", "--cfg", "job"), target=1.5),
    *(Command(f"{name} help", ("-m", f"mtrl.{name}", "--help"), target=1.5) for name in PROGRAMS),
    Command("wrong key", ("-m", "mtrl.main", "trainer.max_step=1"), status=2, target=2.0),
    Command("wrong value", ("-m", "mtrl.main", "algorithm.group_size=1"), status=2, target=2.0),
    Command("import torch", ("-c", "import torch")),
    Command("import the policy's class", ("-c", "from transformers import Qwen3ForCausalLM")),
    Command("import the training loop", ("-c", "import mtrl.trainer.loop")),
)
STEP = ("-m", "mtrl.main", "experiment=gsm8k", "trainer.max_steps=1", "run_dir=run")
STEP_TARGET = 20.0
MOMENTS = {
    "configuration composed": re.compile(r"\S+ in run$"),
    "data loaded, checks made": re.compile(r"preflight: "),
    "policy and engine set up": re.compile(r"policy +\S+ M parameters"),
    "evaluated": re.compile(r"evaluation at step 0 "),
}
"""Pattern of the line that reports each moment; the first match counts. A moment without a match is left out."""
LAST = STEPPED, ENDED = "step 1 trained", "command ended"


@dataclass(frozen=True)
class Took:
    wall: float
    cpu: float


@dataclass
class Measured:
    """Times of one checkout: a list for each command and each moment of the first step, with one item per round."""

    tree: str
    took: dict[str, list[Took]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, name: str, took: Took) -> None:
        self.took.setdefault(name, []).append(took)

    def least(self, name: str) -> Took | None:
        """Return the least wall seconds and the least CPU seconds of all rounds."""
        rounds = self.took.get(name)
        return Took(min(t.wall for t in rounds), min(t.cpu for t in rounds)) if rounds else None


def environment(tree: Path) -> dict[str, str]:
    """Return an environment with `tree` before installed packages, and with stored bytecode."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return others | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(
    words: Sequence[str], tree: Path, folder: str, on_line: Callable[[str, Took], object] = lambda line, so_far: None
) -> tuple[int, Took, str]:
    """Run a command in `folder`. Return its exit status, its time, and its last line of output.

    Args:
        on_line: function that gets each line as soon as it is printed, and the time so far.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(tree),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    timer = threading.Timer(LIMIT, process.kill)
    timer.start()
    last = ""
    try:
        for line in process.stdout or ():
            last = line.strip() or last
            on_line(line, Took(time.perf_counter() - start, cpu_of(process.pid)))
        status = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return status, Took(wall, cpu), last


def measure_command(command: Command, python: str, tree: Path, measured: Measured, counts: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        status, took, last = run((python, *command.words), tree, folder)
    if status != command.status:
        measured.faults.append(f"{command.name} ended with {status}, not {command.status}: {last}")
    if counts:
        measured.note(command.name, took)


def measure_step(words: Sequence[str], python: str, tree: Path, measured: Measured, counts: bool) -> None:
    """Measure the first training step and the moments before it."""
    passed: dict[str, Took] = {}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:

        def look(line: str, so_far: Took) -> None:
            found = [name for name, pattern in MOMENTS.items() if pattern.match(line)]
            if STEPPED not in passed and is_trained(Path(folder, "run", "metrics.jsonl")):
                found.append(STEPPED)
            for name in found:
                passed.setdefault(name, so_far)

        status, took, last = run((python, *words), tree, folder, look)
    if status or STEPPED not in passed:
        measured.faults.append(f"the first step ended with {status}: {last}")
    if counts:
        for name, at in {**passed, ENDED: took}.items():
            measured.note(name, at)


def is_trained(metrics: Path) -> bool:
    """Whether metrics.jsonl has the row of step 1."""
    try:
        return any(json.loads(line)["step"] >= 1 for line in metrics.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError, KeyError):
        return False


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a running process and of its ended children."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def measure(args: argparse.Namespace, commands: Sequence[Command]) -> list[Measured]:
    """Measure all checkouts in each round, in the opposite order in every second round. The first does not count."""
    trees = [Path(tree).resolve() for tree in args.trees]
    measured = [Measured(str(tree)) for tree in args.trees]
    for number in range(args.rounds + 1):
        turns = list(zip(trees, measured, strict=True))[:: -1 if number % 2 else 1]
        for command in commands:
            for tree, found in turns:
                measure_command(command, args.python, tree, found, counts=number > 0)
        for tree, found in turns if args.step else ():
            measure_step((*STEP, *args.overrides), args.python, tree, found, counts=number > 0)
    return measured


def table(measured: Sequence[Measured], commands: Sequence[Command]) -> str:
    """Return Markdown with a row for each command and moment, two columns for each checkout, and the ratios of the last
    checkout to the first."""
    targets = {command.name: command.target for command in commands} | {STEPPED: STEP_TARGET}
    several = len(measured) > 1
    heads = [f"{m.tree}: wall, s | CPU, s" if several else "wall, s | CPU, s" for m in measured]
    heads += ["wall, last to first | CPU, last to first"] * several
    lines = [f"| | target, s | {' | '.join(heads)} |", "|---" * (2 + 2 * len(heads)) + "|"]
    for name in (*(command.name for command in commands), *MOMENTS, *LAST):
        least = [m.least(name) for m in measured]
        if all(took is None for took in least):
            continue
        cells = [f"{took.wall:.2f} | {took.cpu:.2f}" if took else " | " for took in least]
        if several:
            first, last = least[0], least[-1]
            both = first and last
            cells.append(f"{last.wall / first.wall:.2f} | {last.cpu / max(first.cpu, 1e-2):.2f}" if both else " | ")
        target = targets.get(name)
        lines.append(f"| {name} | {'' if target is None else f'{target:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", default=[str(ROOT)], metavar="PATH", help="checkouts to compare")
    parser.add_argument("--python", default=sys.executable, help="Python interpreter for all checkouts")
    names = [command.name for command in COMMANDS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--no-step", dest="step", action="store_false", help="leave out the first step of training")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    args = parser.parse_args(argv)
    check_sizes(parser, args, rounds=0)  # with 0 only the exit statuses are checked
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    commands = [command for command in COMMANDS if command.name in args.only]
    before = os.getloadavg()[0]
    measured = measure(args, commands)
    load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print(f"minimum of {args.rounds} rounds; {os.cpu_count()} cores, Python {platform.python_version()}; {load}\n")
    print(table(measured, commands))
    if args.json:
        args.json.write_text(json.dumps([asdict(m) for m in measured], indent=2) + "\n", encoding="utf-8")
    faults = [f"{m.tree}: {fault}" for m in measured for fault in m.faults]
    if faults:
        print("\n" + "\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
