"""python -m mtrl.preflight: the checklist before a run.

    python -m mtrl.preflight                                  of the default experiment
    python -m mtrl.preflight experiment=text_to_sql           of another one; overrides as for mtrl.main
    python -m mtrl.preflight preflight.model=false            what needs no model: seconds
    python -m mtrl.preflight preflight.json=PATH              where the results go

It ends with 0 if nothing failed, 1 if a check failed, 2 if the configuration is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.config.compose import compose
from mtrl.config.epochs import with_steps
from mtrl.config.program import run_program
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.preflight import report
from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.context import Context
from mtrl.preflight.result import Result, Status, failed, skipped, to_json, worst
from mtrl.tracking.run_dir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, print, write. Returns the exit status."""
    args = parse(argv)
    config: Config = OmegaConf.to_object(compose(args.overrides, args.config_dir))  # type: ignore[assignment]
    path = Path(config.preflight.json or RunDir(config.run_dir).preflight)
    screen, results = report.console(), []
    with screen.status("checking") if screen.is_terminal else nullcontext() as status:
        for result in check(config):
            results.append(result)
            screen.print(report.table([result]))
            if status and len(results) == len(CHECKS):
                status.update("the policy plays; a tiny one is made first, which takes minutes once")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(config.name, results), encoding="utf-8")
    screen.print()
    screen.print(report.verdict(results))
    screen.print(f"written to {path}", style="dim", soft_wrap=True)
    return int(worst(results) == Status.FAIL)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mtrl.preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for python -m mtrl.main")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def check(config: Config) -> Iterator[Result]:
    """The whole checklist, line by line as it comes; what needs the model comes last."""
    task = load_task(config)
    config = with_steps(config, len(task.splits.train))
    settings = config.preflight
    patience = config.environment.step_timeout + 1.0  # so that a step that hangs is told by its own time limit
    context = Context(
        config,
        task.family,
        task.splits,
        task.make_environment,
        settings.rows,
        settings.seconds,
        patience,
        processes=settings.processes,
    )
    yield from run(context, CHECKS.items())
    yield from of_the_policy(context)


def of_the_policy(context: Context) -> Iterator[Result]:
    """The checks on sampled episodes. Where there are none, the first says why and the others are skipped."""
    from mtrl.preflight.foothold import CHECKS as OF_THE_POLICY
    from mtrl.preflight.foothold import bound, roll_out

    settings = context.config.preflight
    if not settings.model:
        yield from (skipped("preflight.model=false").named(name, 0.0) for name, _ in OF_THE_POLICY)
        return
    try:
        baseline = roll_out(context, settings.rollouts, _quiet)
    except Exception as error:
        first, *others = (name for name, _ in OF_THE_POLICY)
        told = f"the policy could not play: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        yield failed(told, "mend what the message names, or set preflight.model=false").named(first, 0.0)
        yield from (skipped(f"there are no episodes of the policy; see {first}").named(name, 0.0) for name in others)
        return
    yield from run(context, bound(context, baseline))


def _quiet(step: int, success: float | None) -> None:
    """A warm start that has to be made first shows no bar."""


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
