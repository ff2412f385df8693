"""mtrl sweep: the report of a sweep.

mtrl train -m seed=0,1,2,3               runs a sweep, and prints its folder
mtrl sweep outputs/gsm8k/SWEEP           lists its jobs, the best first, also while it runs
mtrl sweep outputs/gsm8k/SWEEP --json    prints JSON for programs
mtrl view outputs/gsm8k/SWEEP            shows the sweep in the viewer, with the curves
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mtrl.command.program import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Return the exit status."""
    args = parse(argv)
    from mtrl.sweep.sweep_runs import read_sweep, to_plain

    sweep = read_sweep(Path(args.sweep))
    if args.json:
        from mtrl.utils.files import to_strict_json

        print(to_strict_json(to_plain(sweep), indent=2))
        return 0
    from mtrl.sweep.table import show

    show(sweep)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", metavar="SWEEP", help="the folder that holds the jobs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
