"""mtrl diagnose: report what is wrong with a run, and the first thing to change.

    mtrl diagnose RUN                     print the first finding in full and the others in one line each
    mtrl diagnose RUN --html FILE.html    write a page with the curves of each finding
    mtrl diagnose RUN --json FILE.json    write all findings for programs; - prints them

The run may still be running. The rules are checked in their order and one change is proposed at a time. A run that
applied a proposed change (parent=RUN) is compared with its parent. The exit status is 0 without an alarm, 1 with an
alarm, and 2 if the command is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrl.command.program import run_program
from mtrl.config.outputs import check_file
from mtrl.diagnose.diagnosis import DiagnosisReport, diagnose
from mtrl.diagnose.finding import Severity
from mtrl.utils.files import replace_text, to_strict_json


def main(argv: Sequence[str] | None = None) -> int:
    """Diagnose the run and write the report. Return the exit status."""
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


def _show(report: DiagnosisReport) -> None:
    from mtrl.diagnose.screen import show

    show(report)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--html", metavar="FILE", help="write a page with curves")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it instead of the report")
    return parser.parse_args(argv)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
