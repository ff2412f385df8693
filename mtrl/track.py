"""mtrl track: send the records of a run to its trackers.

    mtrl track RUN                                  send the records that its trackers do not have yet
    mtrl track RUN --to mlflow                      send to this tracker, not to those of the run
    mtrl track RUN --follow                         continue until the run is over
    mtrl track RUN tracker.mlflow.uri=http://HOST:5000    send to another server

RUN is the folder of a run or of an evaluation. Arrived pieces are noted in RUN/trackers, so the command can be repeated
at any time: it sends only what is new. The exit status is 0 if nothing is left to send, 1 if something is left, and 2
if the command is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mtrl.command.program import run_program
from mtrl.trackers.sending import follow, lines, send
from mtrl.trackers.settings import run_at, tracker_of


def main(argv: Sequence[str] | None = None) -> int:
    """Send the run, and print what has arrived. Return the exit status."""
    args = parse(argv)
    run = run_at(args.run)
    tracker, warnings = tracker_of(run, args.to, args.overrides)
    for warning in warnings:
        _warn(warning)
    try:
        outcomes = follow(run, tracker, _warn) if args.follow else send(run, tracker, _warn)
    except KeyboardInterrupt:
        return 130
    for line in lines(outcomes):
        print(line)
    for outcome in outcomes:
        if outcome.problem:
            _warn(f"{outcome.name}: {outcome.problem}")
        if outcome.hint:
            print(f"{outcome.name}: {outcome.hint}")
    return int(not all(outcome.is_done for outcome in outcomes))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl track", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run or of an evaluation")
    parser.add_argument("overrides", nargs="*", metavar="tracker.key=value", help="what is otherwise than in the run")
    parser.add_argument(
        "--to", action="append", default=[], metavar="TRACKER", help="mlflow, wandb or tensorboard; may be repeated"
    )
    parser.add_argument("--follow", action="store_true", help="go on until the run is over")
    return parser.parse_intermixed_args(argv)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
