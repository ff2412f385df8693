"""mtrl doctor: checks of this machine, an estimate of the memory that a run needs, and a self-test.

    mtrl doctor                                     run all checks, and train for two steps
    mtrl doctor --no-smoke                          run the checks without the training
    mtrl doctor --plan model=qwen3_8b placement=8_gpus    does it fit the GPUs? overrides as for mtrl train
    mtrl doctor --propose model=qwen3_8b placement.gpus=8    a layout of ranks, servers and micro-batches that fits
    mtrl doctor --self-test                         run each part of a training run here, and measure it
    mtrl doctor --json                              print JSON for programs

The exit status is 0, or 1 if the default experiment cannot run here (with --plan: if the run does not fit; with
--propose: if no layout fits; with --self-test: if a part failed), or 2 if the command is wrong. The command uses no
network and leaves no files behind, except for the JSON file of --self-test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict

from mtrl.command.program import run_program
from mtrl.doctor import machine
from mtrl.doctor.advice import Advice, advise
from mtrl.doctor.checklist import CHECKS, Check, run
from mtrl.doctor.checks import SMOKE_LIMIT, smoke
from mtrl.doctor.layout_proposal import propose
from mtrl.doctor.plan import make_plan
from mtrl.doctor.plan import to_json as plan_to_json
from mtrl.doctor.plan_report import page, proposal_page
from mtrl.doctor.self_test import program
from mtrl.errors import UserError
from mtrl.preflight import checklist_table
from mtrl.preflight.result import CheckResult, Status, to_json, worst


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine, plan a run, or run the self-test. Return the exit status."""
    args = parse(argv)
    if args.self_test:
        return program.self_test(args)
    if args.propose:
        return proposed(args)
    return plan(args) if args.plan else look(args)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: settings are given without --plan or --propose, or with --self-test other ones than `model.path`, or
            an option has no effect beside the others.
    """
    words = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--s") and program.OPTION.startswith(word) for word in words):  # it may be abbreviated
        return program.parse(words)
    parser = argparse.ArgumentParser(
        prog="mtrl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="with --plan and --propose: as for mtrl train"
    )
    parser.add_argument(
        "--plan", action="store_true", help="estimate the memory of a run, without a look at this machine"
    )
    parser.add_argument("--propose", action="store_true", help="propose a layout for the GPUs of placement.gpus")
    parser.add_argument(
        program.OPTION, action="store_true", help="run each part of a training run; has options of its own: add --help"
    )
    parser.add_argument("--no-smoke", action="store_true", help="leave the short training run out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config-dir", help="with --plan and --propose: config groups of your own")
    args = parser.parse_intermixed_args(words)
    if args.plan and args.propose:
        raise UserError("--plan and --propose exclude each other; leave one of them out")
    is_of_run = args.plan or args.propose
    if args.no_smoke and is_of_run:
        raise UserError(f"--no-smoke has no effect with {'--plan' if args.plan else '--propose'}; leave it out")
    if args.config_dir is not None and not is_of_run:
        raise UserError(f"--config-dir={args.config_dir} has no effect without --plan or --propose; leave it out")
    if args.overrides and not is_of_run:
        raise UserError(f"{args.overrides[0]} is a setting of a run; plan that run with: --plan {args.overrides[0]}")
    return args


def plan(args: argparse.Namespace) -> int:
    found = make_plan(args.overrides, args.config_dir)
    if args.json:
        print(json.dumps(plan_to_json(found), indent=2))
    else:
        screen = checklist_table.console()
        screen.print(page(found), soft_wrap=True)
    return int(not found.fits)


def proposed(args: argparse.Namespace) -> int:
    found = propose(args.overrides, args.config_dir)
    if args.json:
        answer = {"settings": found.words, "ruled_out": found.reasons, "plan": plan_to_json(found.plan)}
        print(json.dumps(answer, indent=2))
    else:
        checklist_table.console().print(proposal_page(found, args.overrides, args.config_dir), soft_wrap=True)
    return int(not found.plan.fits)


def look(args: argparse.Namespace) -> int:
    """Print each result as its check completes, then the advice for this machine. Return the exit status."""
    screen, results = checklist_table.console(), []
    waiting = screen.status("checking") if screen.is_terminal and not args.json else nullcontext()
    with waiting:
        for result in examine(args.no_smoke):
            results.append(result)
            if not args.json:
                screen.print(checklist_table.table([result]))
        runs = worst(results) != Status.FAIL
        can = advice(results) if runs else []
    if args.json:
        print(json.dumps(json.loads(to_json("doctor", results)) | {"can": [asdict(one) for one in can]}, indent=2))
    else:
        screen.print()
        for one in can:
            screen.print(f"{one.what}:\n  {one.command}", soft_wrap=True)
        if not runs:
            screen.print("the default experiment cannot run here: fix what failed first", style="bold red")
    return int(not runs)


def examine(no_smoke: bool = False) -> Iterator[CheckResult]:
    """Yield all results; the smoke run comes last, and only if no check failed before it."""
    results: list[CheckResult] = []
    for result in run(CHECKS):
        results.append(result)
        yield result
    if not no_smoke and worst(results) != Status.FAIL:
        last: dict[str, Check] = {"smoke run": smoke}
        yield from run(last, SMOKE_LIMIT + 30)


def advice(results: Sequence[CheckResult]) -> list[Advice]:
    """Return the advice that follows from the results."""
    passed = {result.name for result in results if result.status == Status.PASS}
    engine = next((name for name in ("vllm", "sglang") if name in passed), None)
    return advise(machine.ask_torch().gpus, engine)


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
