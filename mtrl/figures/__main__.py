"""mtrl figures: draw figures of runs in the quality of a paper.

    mtrl figures RUN                                write RUN/figures, with an index.html
    mtrl figures RUN RUN RUN --out FOLDER           draw runs that differ only by their seed as one line
    mtrl figures SWEEP --out FOLDER --x tokens      draw every run up to two levels below a folder
    mtrl figures SWEEP --only learning,stops --format pdf --out FOLDER
    mtrl figures SWEEP --table --out FOLDER         also write a table of the final success of each group

Runs are grouped by their configuration. The label of a group names the settings that distinguish it from the others.
The exit status is 0, or 2 if the command is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from mtrl.command.program import run_program
from mtrl.config.outputs import check_local
from mtrl.errors import UserError
from mtrl.figures import results
from mtrl.figures.axis import Axis, Study
from mtrl.figures.groups import SeedGroup, find_runs, group_runs, repeated_seeds
from mtrl.figures.index import FIGURES, draw, page
from mtrl.figures.style import save
from mtrl.utils.files import replace_text


def main(argv: Sequence[str] | None = None) -> int:
    """Read and group the runs, and draw the figures. Return the exit status."""
    args = parse(argv)
    check_local(f"--out {args.out}", args.out)
    names = chosen(args.only, args.x)
    groups = read_groups(args.runs)
    study = Study(groups, args.x)
    folder = args.out or default_folder(groups)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made ({error.strerror}); name another folder") from error
    drawings = {name: draw(name, study) for name in names}
    for name, drawing in drawings.items():
        save(drawing.figure, folder / f"{name}.{args.format}", drawing.caption)
    if args.table:
        replace_text(folder / "table.md", results.markdown(groups))
        replace_text(folder / "table.tex", results.latex(groups))
        print(results.markdown(groups))
    replace_text(folder / "index.html", page(drawings, groups, args.format, args.table))
    print(f"{len(names)} figure{'s' * (len(names) > 1)} of {counted(groups)}: {folder / 'index.html'}")
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or one that holds runs")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="output folder; default for a single run: RUN/figures"
    )
    parser.add_argument("--format", choices=["png", "svg", "pdf"], default="png")
    parser.add_argument("--only", metavar="NAME,…", help=f"some of: {', '.join(FIGURES)}")
    parser.add_argument(
        "--table", action="store_true", help="also write the final success of every group: table.md, table.tex"
    )
    parser.add_argument(
        "--x",
        type=Axis,
        choices=list(Axis),
        default=Axis.STEPS,
        metavar="|".join(Axis),
        help="the horizontal axis of curves",
    )
    return parser.parse_args(argv)


def chosen(only: str | None, axis: Axis) -> list[str]:
    """Return the names of the figures to draw, in the order of the catalogue.

    Raises:
        UserError: A name is unknown, or no named figure uses the requested axis.
    """
    if only is None:
        return list(FIGURES)
    requested = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in requested if name not in FIGURES]
    if unknown or not requested:
        wrong = unknown[0] if unknown else "this"
        near = get_close_matches(wrong, FIGURES, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(FIGURES)}"
        raise UserError(f"--only {only}: {wrong} is no figure; {advice}")
    if axis is not Axis.STEPS and not any(FIGURES[name].over_time for name in requested):
        raise UserError(f"--x {axis} changes nothing in {', '.join(requested)}; leave it out")
    return [name for name in FIGURES if name in requested]


def read_groups(paths: Sequence[str]) -> list[SeedGroup]:
    """Return the groups of all runs. Runs that are left out or count twice are reported on stderr.

    Raises:
        UserError: No run has a row of metrics.
    """
    found = find_runs(paths)
    runs, empty = [run for run in found if run.rows], [run for run in found if not run.rows]
    if not runs:
        raise UserError(f"{empty[0].path} has no row of metrics yet; wait for its first step")
    for run in empty:
        print(f"warning: {run.path} has no row of metrics yet, and is left out", file=sys.stderr)
    groups = group_runs(runs)
    for group in groups:
        for first, second in repeated_seeds(group):
            print(
                f"warning: {second.path} and {first.path} have the same settings and seed; both count, and make the "
                "spread too small",
                file=sys.stderr,
            )
    return groups


def counted(groups: Sequence[SeedGroup]) -> str:
    runs = sum(group.seeds for group in groups)
    words = "1 run" if runs == 1 else f"{runs} runs"
    return words if len(groups) == 1 else f"{words} in {len(groups)} groups"


def default_folder(groups: Sequence[SeedGroup]) -> Path:
    """Return the folder of the figures of a single run.

    Raises:
        UserError: The figures are of several runs, so they belong to no single folder.
    """
    if len(groups) > 1 or groups[0].seeds > 1:
        raise UserError("figures of several runs need --out FOLDER")
    return groups[0].runs[0].path / "figures"


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
