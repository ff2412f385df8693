"""mtrl rescore: recompute the rewards and scores of stored trajectories without a model.

    mtrl rescore RUN                                uses the run's own settings: nothing must change
    mtrl rescore RUN reward.scheme=guide            uses another reward
    mtrl rescore FILE.jsonl +experiment=games       reads a file of mtrl play
    mtrl rescore RUN --json                         prints JSON instead of the table
    mtrl rescore RUN out=FILE.json                  prints the table, and writes JSON to FILE.json

The responses are replayed in a fresh environment. If its observations differ from the stored ones, the episode is
reported and not rescored. The exit status is 0 if every trajectory was rescored, 1 if some were not, 2 if the command
is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from mtrl.command.checks import check
from mtrl.command.compose import merge
from mtrl.command.program import run_program
from mtrl.command.stored import key_of, of_run
from mtrl.config.outputs import check_file
from mtrl.config.overrides import normalise
from mtrl.config.schema import Config
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.record.run import run_of
from mtrl.record.stored import StoredLine, files_of, read
from mtrl.rescore.replay import LeftOut, Rescored, Rescorer
from mtrl.rescore.rescore_report import RescoreReport
from mtrl.scoring.agreement import Thresholds
from mtrl.utils.files import replace_text, to_strict_json

READ = (
    *("reward", "environment", "environments", "data", "plugins"),
    *("evaluation.success_threshold", "evaluation.claim_threshold", "generator.max_turns"),
)
"""Keys and sections that a rescoring reads. For a run, overrides of other keys are rejected because they have no
effect."""


def main(argv: Sequence[str] | None = None) -> int:
    """Read and rescore the trajectories, and report the results. Return the exit status."""
    args = parse(argv)
    out, overrides = split_out(args.overrides)
    source = Path(args.source)
    files, run = files_of(source), run_of(source)
    cfg, warnings = configuration(run, overrides)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    rescorer = Rescorer(config, load_task(config))
    check_repeatable(rescorer)
    for warning in [*warnings, *unread(rescorer, overrides)]:
        print(f"warning: {warning}", file=sys.stderr)
    found = rescore_all(rescorer, itertools.chain.from_iterable(map(read, files)))
    report = RescoreReport(
        [line for line in found if isinstance(line, Rescored)],
        [line for line in found if isinstance(line, LeftOut)],
        Thresholds.of(config.evaluation),
        rescorer.replays,
    )
    text = to_strict_json(report.to_dict(str(source), overrides), indent=2) + "\n"
    if out is not None:
        replace_text(out, text)
    if args.json:
        print(text, end="")
    else:
        report.show()
        if out is not None:
            print(f"written to {out}")
    return int(bool(report.left_out))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mtrl rescore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the folder of a run, or a JSONL file of trajectories")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_intermixed_args(argv)


def split_out(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the path of the JSON file, and the overrides."""
    mine = [word.partition("=")[2] for word in words if word.startswith("out=")]
    out = Path(mine[-1]) if mine else None
    if out is not None:
        check_file(f"out={out}", out)
    return out, [word for word in words if not word.startswith("out=")]


def configuration(run: Path | None, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the checked configuration, and warnings.

    Raises:
        UserError: the configuration is invalid, or an override has no effect.
    """
    if run is None:
        cfg = merge(normalise(overrides))
    else:
        for override in overrides:
            check_read(override)
        cfg = of_run(run, overrides)
    return cfg, check(cfg)


def check_read(override: str) -> None:
    """Check that a rescoring reads the key of the override.

    Raises:
        UserError: the override would have no effect.
    """
    key = key_of(override)
    if not any(key == read or key.startswith(f"{read}.") for read in READ):
        raise UserError(f"{override} changes nothing here: rescoring a run reads {', '.join(READ)}")


def check_repeatable(rescorer: Rescorer) -> None:
    """Check that a replay can give the stored observations again.

    Raises:
        UserError: a task makes requests to a server whose answers vary, see `Family.offline`.
    """
    tasks = rescorer.task.sources or {"": rescorer.task}
    online = [task.family.name for task in tasks.values() if task.make_offline is not None]
    if rescorer.replays and online:
        raise UserError(
            f"environment.config lets a server write the observations of {online[0]}, and a replay gets other ones; "
            "rescore with reward.components.environment=0 and components that read only the messages"
        )


def unread(rescorer: Rescorer, overrides: Sequence[str]) -> list[str]:
    """Return warnings about settings of an environment that is not replayed."""
    idle = [o for o in overrides if o.lstrip("+~").startswith(("environment", "reward.scheme", "generator."))]
    if rescorer.replays or not idle:
        return []
    return [f"{', '.join(idle)} changes no reward, because the reward does not depend on the environment"]


def rescore_all(rescorer: Rescorer, stored: Iterable[StoredLine]) -> list[Rescored | LeftOut]:
    """Rescore the trajectories in batches of whole groups, and return the results in the order of the lines."""
    screen = Console(stderr=True)
    found: list[Rescored | LeftOut] = []

    async def run() -> None:
        groups = (list(lines) for _, lines in itertools.groupby(stored, _group_of))
        while some := list(itertools.islice(groups, 4 * rescorer.workers)):
            found.extend(itertools.chain.from_iterable(await asyncio.gather(*map(rescorer.rescore, some))))

    with screen.status("rescoring") if screen.is_terminal else nullcontext():
        asyncio.run(run())
    return found


def _group_of(stored: StoredLine) -> tuple[Path, str | int, str]:
    """Return a value that is equal for consecutive lines of one group."""
    if stored.trajectory is None:
        return stored.file, stored.line, ""
    return stored.file, stored.trajectory.group_id, stored.trajectory.task_id


def cli(argv: Sequence[str] | None = None) -> None:
    run_program(main, argv)


if __name__ == "__main__":
    cli()
