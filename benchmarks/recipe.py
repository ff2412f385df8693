"""Time and memory of a training step of a recipe, compared between checkouts or between settings.

    python benchmarks/recipe.py                                  experiment=gsm8k, this checkout
    python benchmarks/recipe.py --trees OLD .                    two checkouts, alternately, with ratios
    python benchmarks/recipe.py --ways "" trainer.packing=true   two settings
    python benchmarks/recipe.py --experiment text_to_sql --steps 12 --rounds 3

Each run is the command of a user, in a process of its own. Its first step is a warm-up and is left out. Each figure is
the median over the other steps, and then the median over the rounds, with ratios within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from start import run

NUMBERS = {
    "time/step": "step, s",
    "time/generate": "generate, s",
    "time/update": "update, s",
    "perf/tokens_per_second": "sampled tokens/s",
    "perf/packing_efficiency": "share of tokens without padding",
    "perf/memory_bytes": "peak RSS, MiB",
}
"""Keys of metrics.jsonl, and their headings in the table."""


@dataclass(frozen=True)
class Way:
    """A checkout, and the overrides of its run."""

    tree: Path
    words: str

    def __str__(self) -> str:
        return " ".join((str(self.tree), self.words)).strip()


def measure(way: Way, experiment: str, steps: int) -> dict[str, float]:
    """Run the recipe once, and return the median of each of `NUMBERS` over its steps.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        settings = [f"experiment={experiment}", f"trainer.max_steps={steps}", "run_dir=run", *shlex.split(way.words)]
        status, _, last = run([sys.executable, "-m", "mtrl.main", *settings], way.tree.resolve(), folder)
        if status:
            raise SystemExit(f"{way} ended with {status}: {last}")
        rows = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        trained = [row for row in rows if "time/step" in row][1:]
    # Steps in which no group had an advantage have no update.
    values = {key: [row[key] for row in trained if key in row] for key in NUMBERS}
    found = {key: statistics.median(numbers) if numbers else math.nan for key, numbers in values.items()}
    return found | {"perf/memory_bytes": trained[-1]["perf/memory_bytes"] / 2**20}


def table(measured: dict[Way, list[dict[str, float]]]) -> str:
    """Return Markdown with a row for each way. All rows but the first have ratios to the first row."""
    first, *_ = measured.values()
    lines = ["| | " + " | ".join(NUMBERS.values()) + " |", "|---" * (len(NUMBERS) + 1) + "|"]
    for way, rounds in measured.items():
        cells = []
        for key in NUMBERS:
            values = [row[key] for row in rounds]
            cell = f"{statistics.median(values):,.{0 if max(values) > 100 else 2}f}"
            if rounds is not first:
                ratio = statistics.median(value / base[key] for value, base in zip(values, first, strict=True))
                cell += f" (x {ratio:.2f})"
            cells.append(cell)
        lines.append(f"| `{way}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=Path, default=[Path()], help="checkouts (default: this folder)")
    parser.add_argument("--ways", nargs="+", default=[""], help="overrides; one argument has all overrides of a run")
    parser.add_argument("--experiment", default="gsm8k")
    parser.add_argument("--steps", type=int, default=8, help="steps, including the first one (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="default %(default)s")
    args = parser.parse_args()
    if args.steps < 2 or args.rounds < 1:
        parser.error("--steps must be at least 2, since the first is left out, and --rounds at least 1")
    ways = [Way(tree, words) for tree, words in itertools.product(args.trees, args.ways)]
    measured: dict[Way, list[dict[str, float]]] = {way: [] for way in ways}
    load = os.getloadavg()[0]
    for _ in range(args.rounds):
        for way, rounds in measured.items():
            rounds.append(measure(way, args.experiment, args.steps))
    print(f"experiment={args.experiment}, {args.steps} steps, {args.rounds} rounds; load average before {load:.1f}\n")
    print(table(measured))


if __name__ == "__main__":
    main()
