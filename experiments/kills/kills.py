"""Kills runs at random moments, resumes them, and looks for damaged checkpoints and for groups trained twice or lost.

    python experiments/kills/kills.py                                 50 kills, 10 of each kind
    python experiments/kills/kills.py --only rank --kills 3 --seed 1

The runs, their output and the findings stay under `--root`. The exit status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from story import Killer, Moments, Story
from targets import TARGETS, Target

OVERRIDES = (
    "model.tiny.hidden_size=64",
    "model.tiny.intermediate_size=128",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.warm_start.demonstrations=256",
    "model.warm_start.success_band=[0,1]",
    "model.warm_start.check_every=150",
    "model.warm_start.episodes=8",
    "data.synthetic_train_rows=256",
    "data.synthetic_test_rows=16",
    "evaluation.rows=8",
    "evaluation.sampled_rows=0",
    "evaluation.before_train=false",
    "evaluation.every_steps=0",
    "generator.sampling_params.max_generate_length=24",
    "trainer.prompts_per_step=4",
    "trainer.max_steps=12",
    "trainer.optimizer.lr=3e-3",
    "trainer.checkpoint.every_steps=1",
    "trainer.save_trajectories_every=1",
    "tracker.plots=false",
)
"""Overrides of a run that takes seconds, saves after every step and stores all trained trajectories."""
KILLS_PER_RUN = 3
"""Greatest number of kills of a run: the number of times that the torchrun of `targets` restarts a job."""
COLUMNS = (
    "killed",
    "kills",
    "in mid-checkpoint",
    "runs",
    "ended",
    "checkpoints read",
    "corrupt",
    "twice",
    "lost",
    "else",
)


def kill_often(target: Target, kills: int, root: Path, overrides: Sequence[str], seed: int) -> list[Story]:
    """Make runs until they have `kills` kills in total, or until a run does not end."""
    stories: list[Story] = []
    undisturbed = make_undisturbed(target, root, overrides) if target.is_exact else None
    while (done := sum(len(story.kills) for story in stories)) < kills:
        name = f"{target.name}_{seed}_{len(stories)}"
        killer = Killer(target, root / name, overrides, random.Random(name), Moments())
        stories.append(killer.run(min(KILLS_PER_RUN, kills - done), undisturbed))
        (root / f"{name}.json").write_text(json.dumps(asdict(stories[-1]), indent=2) + "\n")
        print(f"{name}: {summary(stories[-1])}", file=sys.stderr, flush=True)
        if stories[-1].failure:
            break
    return stories


def make_undisturbed(target: Target, root: Path, overrides: Sequence[str]) -> Path:
    """Run the same command without a kill."""
    run_dir = root / f"undisturbed_{'ranks' if 'torch.distributed.run' in target.command else 'process'}"
    if not (run_dir / "summary.json").exists() and (code := target.start(run_dir, overrides).wait()):
        raise SystemExit(f"{run_dir} ended with {code}, see {run_dir}.log")
    return run_dir


def summary(story: Story) -> str:
    """Return the kills and the faults of a run in one line."""
    kills = ", ".join(f"{kill.moment} {kill.step}" for kill in story.kills)
    return f"killed at {kills}; " + ("; ".join(story.faults) or "no faults")


def table(stories: Sequence[Story]) -> str:
    """Return Markdown with a row for each kind of kill and one for all kinds."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for target in TARGETS:
        if mine := [story for story in stories if story.target == target.name]:
            lines.append(row(target.what, mine))
    return "\n".join([*lines, row("all", stories)]) + "\n"


def row(what: str, stories: Sequence[Story]) -> str:
    kills = [kill for story in stories for kill in story.kills]
    audits = [audit for story in stories for audit in story.audits]
    cells = [
        len(kills),
        sum(kill.left_half for kill in kills),
        len(stories),
        sum(story.failure is None for story in stories),
        sum(audit.checkpoints for audit in audits),
        *(sum(len(getattr(audit, kind)) for audit in audits) for kind in ("corrupt", "doubled", "lost", "differences")),
    ]
    return f"| {what} | {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("outputs/kills"), help="new folder for the runs")
    parser.add_argument("--only", nargs="+", choices=[target.name for target in TARGETS], help="kinds of kill")
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of the runs")
    arguments = parser.parse_args()
    arguments.root.mkdir(parents=True, exist_ok=True)
    overrides = [*OVERRIDES, *arguments.set]
    chosen = [target for target in TARGETS if target.name in (arguments.only or [t.name for t in TARGETS])]
    stories = [
        story
        for target in chosen
        for story in kill_often(target, arguments.kills, arguments.root, overrides, arguments.seed)
    ]
    print(table(stories))
    faults = [f"{story.name}: {fault}" for story in stories for fault in story.faults]
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
