"""Time of the training step of `step.py` with mtrl and with TRL, each with its own interpreter.

    python -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    python benchmarks/trl.py --trl-python .venv-trl/bin/python
    python benchmarks/trl.py --trl-python .venv-trl/bin/python --learning

Every round runs all ways of TRL and of mtrl, each in a new process, on 1 thread (CPU seconds) and on 2 threads (wall
seconds). Ratios are taken within a round, for each figure to the least value of all ways of TRL. Both sides must sample
and train the same number of tokens; otherwise the benchmark ends with an error. With `--learning` it instead compares
the numbers of steps in which both sides learn the same task.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from step import cpu_model
from step import parse as parse_sizes
from trl_learning import SMALL, Lesson, compare
from trl_report import Run, check, lesson_table, table
from trl_step import Way
from trl_task import make_job

from mtrl.command.program import one_sentence
from mtrl.errors import UserError

HERE = Path(__file__).parent
VARIABLE = "MTRL_TRL_PYTHON"
WAYS = ("float32/64", "bfloat16/16", "bfloat16/8")
"""Ways of TRL: the two that were published, and the fastest one that was found here, with the least memory."""
LIMIT = 3600
"""Time limit of one process, in seconds."""
INSTALL = "python -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0"


class Trl:
    """The interpreter of an environment with TRL."""

    def __init__(self, python: str | None):
        """
        Raises:
            UserError: the interpreter is missing, or it has no TRL.
        """
        named = f"--trl-python={python}"
        fix = f"give the interpreter of an environment with TRL ({INSTALL})"
        if not python:
            raise UserError(f"neither --trl-python nor {VARIABLE} is set; {fix}")
        try:
            command = [python, "-I", "-c", "from importlib.metadata import version; print(version('trl'))"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except OSError:
            raise UserError(f"{named} is no program; {fix}") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{named} does not answer within a minute; {fix}") from None
        if done.returncode:
            raise UserError(f"{named} has no TRL; {fix}")
        self.python, self.version = python, done.stdout.strip()

    def run(self, jobs: Sequence[Any], folder: Path) -> list[dict[str, Any]]:
        threads = max(job["threads"] for job in jobs)
        # -I, because this folder, and perhaps PYTHONPATH, has a file with the name of the package TRL.
        return hand_over([self.python, "-I", str(HERE / "trl_step.py")], jobs, threads, folder)


def hand_over(command: Sequence[str], jobs: Sequence[Any], threads: int, folder: Path) -> list[dict[str, Any]]:
    """Run a program that reads jobs from one file and writes a result for each to another. Return the results."""
    given, output = folder / "jobs.json", folder / "results.json"
    output.unlink(missing_ok=True)
    given.write_text(json.dumps(list(jobs)), encoding="utf-8")
    run([*command, str(given), str(output)], threads, folder)
    return json.loads(output.read_text(encoding="utf-8"))


def run(command: Sequence[str], threads: int, folder: Path) -> None:
    """Run a command until it ends.

    Raises:
        UserError: it failed, and its output was printed; or it took longer than `LIMIT`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    log = folder / "log.txt"
    name = Path(next(word for word in command if word.endswith(".py"))).name
    with log.open("w") as stream:
        try:
            done = subprocess.run(command, stdout=stream, stderr=stream, env=environment, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise UserError(f"{name} took longer than {LIMIT} s; give it smaller sizes (--sizes)") from None
    if done.returncode:
        print(log.read_text(encoding="utf-8", errors="replace")[-8000:].strip(), file=sys.stderr)
        raise UserError(f"{name} ended with {done.returncode}; see its output above")


def measure(trl: Trl, args: argparse.Namespace, folder: Path) -> list[Run]:
    """Run all rounds."""
    runs: list[Run] = []
    for number in range(args.rounds):
        for threads in args.threads:
            both = [("TRL", way) for way in args.ways] + [("mtrl", words) for words in args.ours]
            for side, what in both if number % 2 == 0 else reversed(both):
                result = (their_step if side == "TRL" else our_step)(trl, what, threads, args, folder)
                one = Run(side, f"{side} {what}".strip(), threads, number, result)
                runs.append(one)
                check(runs)
                output = f"{one.figures['step']:.2f} s, of which {one.figures['generate']:.2f} s generation"
                print(f"round {number + 1}, {threads} thread(s), {one.name}: {output}", flush=True)
    return runs


def their_step(trl: Trl, way: Way, threads: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes, _ = parse_sizes([*args.sizes, "--threads", str(threads), "--steps", str(args.steps)])
    (result,) = trl.run([make_job(sizes, way, sizes.steps + 1, folder / "policy")], folder)
    return result


def our_step(trl: Trl, words: str, threads: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    output = folder / "step.json"
    sizes = [*args.sizes, "--threads", str(threads), "--steps", str(args.steps), *shlex.split(words)]
    run([sys.executable, str(HERE / "step.py"), *sizes, "--json", str(output)], threads, folder)
    return json.loads(output.read_text(encoding="utf-8"))


def learn(trl: Trl, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run the same lessons with TRL and with each way of mtrl."""

    def lessons(words: str) -> list[Lesson]:
        sizes = [*SMALL.split(), *args.sizes, *shlex.split(words)]
        return [Lesson([*sizes, "--seed", str(seed)], args.lr, args.enough, args.most) for seed in range(args.seeds)]

    jobs = [lesson.job(folder / f"policy{seed}") for seed, lesson in enumerate(lessons(""))]
    theirs = [result["rewards"] for result in trl.run(jobs, folder)]
    found = []
    for words in args.ours:
        mine = lessons(words)
        command = [sys.executable, str(HERE / "trl_learning.py")]
        output = hand_over(command, [asdict(lesson) for lesson in mine], mine[0].sizes.threads, folder)
        found.append({"ours": words, **compare(theirs, [result["rewards"] for result in output], mine[0])})
    return found


def header(trl: Trl, load: Sequence[float], runs: Sequence[Run]) -> str:
    """Return the sizes, the machine and the versions as text."""
    lines = [f"{cpu_model()}, {os.cpu_count()} cores, load average {load[0]:.1f} to {load[1]:.1f}; TRL {trl.version}"]
    if runs:
        mine, theirs = (next(run.result for run in runs if run.side == side) for side in ("mtrl", "TRL"))
        sizes, tokens, on = mine["settings"], mine["best"]["tokens"], theirs["machine"]
        lines = [
            f"{mine['parameters'] / 1e6:.2f} M parameters; {sizes['prompts']} prompts x {sizes['group_size']} "
            f"completions, {sizes['turns']} turns x {sizes['tokens']} tokens; {tokens['sampled']:,} tokens sampled "
            f"and {tokens['trained']:,} trained by each",
            f"{lines[0]} with torch {on['torch']}, transformers {on['transformers']}; mtrl with torch "
            f"{mine['machine']['torch']}, transformers {mine['machine']['transformers']}",
            f"fastest of {sizes['steps']} steps after one warm-up in each process; medians of the rounds "
            "(minimum-maximum), ratios within a round",
        ]
    return "\n".join(lines)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    def way(text: str) -> Way:
        try:
            return Way.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=os.environ.get(VARIABLE), help=f"default: the variable {VARIABLE}")
    parser.add_argument(
        "--ways", nargs="+", type=way, default=list(map(Way.read, WAYS)), metavar="WAY", help=Way.__doc__
    )
    parser.add_argument(
        "--ours", action="append", default=[], metavar="WORDS", help="options of step.py for one way of mtrl (repeat)"
    )
    parser.add_argument("--sizes", type=shlex.split, default=[], metavar="WORDS", help="options of step.py, both sides")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per process; default %(default)s")
    parser.add_argument("--learning", action="store_true", help="compare the steps in which both learn the same task")
    parser.add_argument("--seeds", type=int, default=5, help="lessons of --learning; default %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of --learning; default %(default)s")
    parser.add_argument("--enough", type=float, default=0.95, help="mean reward that ends it; default %(default)s")
    parser.add_argument("--most", type=int, default=100, help="most steps of a lesson; default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    args = parser.parse_args(words)
    for name in ("rounds", "steps", "seeds", "most"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(args.threads) < 1:
        parser.error("--threads must be at least 1")
    args.ours = args.ours or [""]
    return args


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with one_sentence(), tempfile.TemporaryDirectory() as name:
        trl = Trl(args.trl_python)
        before = os.getloadavg()[0]
        runs = [] if args.learning else measure(trl, args, Path(name))
        lessons = learn(trl, args, Path(name)) if args.learning else []
    load = [before, os.getloadavg()[0]]
    parts = [table(runs)] if runs else [f"{lesson['ours']}\n{lesson_table(lesson)}".strip() for lesson in lessons]
    print("\n\n".join(["", header(trl, load, runs), *parts]))
    if args.json is not None:
        found = {"load_average": load, "runs": [asdict(run) for run in runs], "lessons": lessons}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
