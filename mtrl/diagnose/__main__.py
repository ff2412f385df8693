"""python -m mtrl.diagnose: what is wrong with a run, and the first thing to change.

    python -m mtrl.diagnose RUN                     the first finding in full, the others in a line each
    python -m mtrl.diagnose RUN --html FILE.html    a page with the curves that show each of them
    python -m mtrl.diagnose RUN --json FILE.json    all of it for programs; - is the screen

The run may still go on. Rules are walked in their order, one change is proposed at a time, and a run that followed one
(parent=RUN) is compared with its parent. It ends with 0 where there is no alarm, 1 where there is one, 2 if the command
is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrl.config.outputs import check_file
from mtrl.config.program import run_program
from mtrl.diagnose.finding import Severity
from mtrl.diagnose.report import Report, diagnose
from mtrl.tracking.files import replace_text, to_strict_json


def main(argv: Sequence[str] | None = None) -> int:
    """Read, diagnose, report. Returns the exit status."""
    args = parse(argv)
    for option, path in (("--json", args.json), ("--html", args.html)):
        if path not in (None, "-"):
            check_file(f"{option} {path}", path)
    report = diagnose(Path(args.run))
    text = to_strict_json(report.to_dict(), indent=2) + "\n"
    if args.json == "-":
        print(text, end="")
    else:
        _show(report)
    if args.json not in (None, "-"):
        replace_text(Path(args.json), text)
    if args.html is not None:
        from mtrl.diagnose.page import page

        replace_text(Path(args.html), page(report))
    for path in (args.json, args.html):
        if path not in (None, "-"):
            print(f"written to {path}", file=sys.stderr)
    return int(report.diagnosis.worst() == Severity.ALARM)


def _show(report: Report) -> None:
    from mtrl.diagnose.screen import show

    show(report)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mtrl.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--html", metavar="FILE", help="write a page with curves")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it instead of the report")
    return parser.parse_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
