"""mtrl preflight: the checklist before a run.

    mtrl preflight                                  checks the default experiment
    mtrl preflight experiment=text_to_sql           checks another one; overrides as for mtrl train
    mtrl preflight preflight.model=false            runs only checks that need no model: seconds
    mtrl preflight preflight.json=PATH              writes the results to PATH

The exit status is 0 if no check failed, 1 if a check failed, 2 if the configuration is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from mtrl.algorithms.registry import find_estimator
from mtrl.command.compose import compose
from mtrl.command.program import run_program
from mtrl.config.epochs import with_steps
from mtrl.config.outputs import check_file
from mtrl.config.schema import Config
from mtrl.environments.factory import Task, load_task
from mtrl.errors import UserError
from mtrl.preflight import checklist_table
from mtrl.preflight.checklist import CHECKS, run
from mtrl.preflight.context import CheckContext
from mtrl.preflight.result import CheckResult, Status, failed, skipped, to_json, worst
from mtrl.preflight.sources import of_source, tasks_of
from mtrl.record.run_dir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration, run the checks, print and write the results. Return the exit status."""
    args = parse(argv)
    config: Config = OmegaConf.to_object(compose(args.overrides, args.config_dir))  # type: ignore[assignment]
    path = results_file(config)
    file = path.absolute()  # an environment may change the working directory
    screen, results = checklist_table.console(), []
    longest = max((len(f"{name}: ") for name in config.environments), default=0)
    with screen.status("checking") if screen.is_terminal else nullcontext() as status:
        for result in check(config):
            results.append(result)
            screen.print(checklist_table.table([result], checklist_table.NAME + longest))
            if status and len(results) == len(CHECKS) * (len(config.environments) or 1):
                status.update("the policy runs episodes; a tiny policy is made first, which takes minutes once")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_json(config.name, results), encoding="utf-8")
    screen.print()
    screen.print(checklist_table.verdict(results))
    screen.print(f"written to {path}", style="dim", soft_wrap=True)
    return int(worst(results) == Status.FAIL)


def results_file(config: Config) -> Path:
    """Return the path of the results.

    Raises:
        UserError: `preflight.json` cannot be written, which must not show after minutes of checks.
    """
    if not config.preflight.json:
        return RunDir(config.run_dir).preflight
    path = Path(config.preflight.json)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"preflight.json={path} cannot be written, for {path.parent} cannot be made ({error.strerror}); name "
            "another file"
        ) from error
    check_file(f"preflight.json={path}", path)
    return path


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl preflight", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for mtrl train")
    parser.add_argument("--config-dir", help="config groups of your own")
    return parser.parse_intermixed_args(argv)


def check(config: Config) -> Iterator[CheckResult]:
    """Yield the results of the whole checklist as they complete, those of a mixture for each source, under names such
    as `words: gold`. The checks that need the model come last."""
    task = load_task(config)
    critic = find_estimator(config.algorithm.advantage_method).needs_critic
    config = with_steps(config, len(task.splits.train), critic)
    contexts = {name: context_of(*own) for name, own in tasks_of(config, task).items()}
    for name, context in contexts.items():
        yield from (of_source(name, result) for result in run(context, CHECKS.items()))
    yield from policy_results(config, contexts)


def context_of(config: Config, task: Task) -> CheckContext:
    """Return the input of the checks of one task, with the limits of `preflight.*`."""
    settings = config.preflight
    patience = config.environment.step_timeout + 1.0  # a step that hangs reaches its own time limit first
    return CheckContext(
        config,
        task.family,
        task.splits,
        task.make_environment,
        settings.rows,
        settings.seconds,
        patience,
        processes=settings.processes,
    )


def policy_results(config: Config, contexts: Mapping[str, CheckContext]) -> Iterator[CheckResult]:
    """Yield the results of the checks on sampled episodes, of each context. If sampling fails, the first check reports
    why and the others are skipped."""
    from mtrl.preflight.policy_checks import CHECKS as POLICY_CHECKS
    from mtrl.preflight.policy_checks import bound, roll_out

    names = [name for name, _ in POLICY_CHECKS]
    if not config.preflight.model:
        yield from _skipped(contexts, names, "preflight.model=false")
        return
    try:
        baselines = roll_out(config, contexts, config.preflight.rollouts, _quiet)
    except Exception as error:
        evidence = (
            f"the policy could not run episodes: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        )
        yield failed(evidence, "fix what the message names, or set preflight.model=false").named(names[0], 0.0)
        yield from _skipped([""], names[1:], f"there are no episodes of the policy; see {names[0]}")
        return
    for name, context in contexts.items():
        if name in baselines:
            yield from (of_source(name, result) for result in run(context, bound(context, baselines[name])))
        else:
            yield from _skipped([name], names, "the source has no training rows, since its weight is 0")


def _skipped(sources: Iterable[str], names: Iterable[str], why: str) -> Iterator[CheckResult]:
    return (of_source(source, skipped(why).named(name, 0.0)) for source in sources for name in names)


def _quiet(step: int, success: float | None) -> None:
    """Ignore the progress of a warm start, which shows no progress bar here."""


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
