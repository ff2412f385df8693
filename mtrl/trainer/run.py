"""One run, from a checked configuration to summary.json: `train` on the leader, `follow` on the other ranks."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from mtrl.algorithms.registry import find_estimator
from mtrl.config.config_dir import config_dir_flags
from mtrl.config.derived import prompt_of, serves
from mtrl.config.epochs import with_steps
from mtrl.config.mixture import described_tasks
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import FsdpConfig
from mtrl.console.console import Console
from mtrl.console.progress import Work
from mtrl.environments.factory import load_task, writes_prompts
from mtrl.errors import EndedAtOnce, Interrupted, PrunedError, UserError, disk_error
from mtrl.figures.plots import draw_curves
from mtrl.record.checksums import changes
from mtrl.record.run_dir import RunDir
from mtrl.record.run_lock import RunLock
from mtrl.record.run_log import RunLog
from mtrl.rewards.judge import record_spending
from mtrl.trackers import start_followers
from mtrl.trainer.checkpoint.checkpoint import Checkpoint, Checkpoints, find_checkpoint, read_checkpoint
from mtrl.trainer.hooks import Hooks
from mtrl.utils.process import environment_integer, is_launched, settled
from mtrl.utils.text import from_here

if TYPE_CHECKING:
    from mtrl.distributed.world import World

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def train(cfg: DictConfig, hooks: Hooks = Hooks()) -> dict[str, Any]:
    """Train with the configuration `cfg` and return the contents of summary.json.

    Raises:
        UserError: the run cannot continue, or its folder cannot be written; the message gives the reason.
        EndedAtOnce: a second signal, or Ctrl-C before the first step, ended the run.
    """
    config: Config = OmegaConf.to_object(cfg)
    # The path is absolute, since an environment may change the working directory of the process at any time.
    run = RunDir(Path(config.run_dir).absolute()).create(resume=config.resume != "none")
    with _writable(run, config), RunLock(run):
        with RunLog(run.log) as log, record_spending(run.spending):
            if config.resume == "none" or not run.config.exists():
                run.write_config(cfg)
            console = Console(mirror=log.line)
            log.show_warnings(console.show_warning)
            try:
                summary = _train(config, run, console, hooks)
            except Exception:
                logging.getLogger("mtrl").info("the run stopped", exc_info=True)
                raise
            except KeyboardInterrupt as end:
                raise ended_at_once(end, config, run) from end
        run.write_checksums()
    return summary


def follow() -> None:
    """Hold a share of the models and execute the leader's calls, until the leader dismisses the followers.

    Raises:
        JobLost: the leader or another rank is lost.
    """
    from mtrl.distributed.rank_group import RankGroup
    from mtrl.distributed.world import World
    from mtrl.trainer.setup.models import make_learner

    with closing(World.join(FsdpConfig.timeout)) as world:
        config, path = world.broadcast(None)
        RankGroup(world, make_learner(config, world, path)).follow()


@contextmanager
def _writable(run: RunDir, config: Config) -> Iterator[None]:
    """Context that converts errors of writing to the folder of the run to a `UserError`.

    Raises:
        UserError: the disk is full, or the folder is read-only.
    """
    try:
        yield
    except Exception as error:
        if disk_error(error) in FULL:
            again = resume_command(config)
            raise UserError(f"there is no space left for {run}; free some, then go on with: {again}") from error
        if isinstance(error, OSError) and error.errno in REFUSED and error.filename:
            file = Path(os.fsdecode(error.filename))
            if run.path in file.parents:
                raise UserError(
                    f"run_dir={run} cannot be written ({error.strerror}: {file.name}); make it writable, or copy it "
                    "and continue with the copy"
                ) from error
        raise


def _train(config: Config, run: RunDir, console: Console, hooks: Hooks) -> dict[str, Any]:
    from mtrl.distributed.world import World

    with closing(World.join(config.trainer.fsdp.timeout)) as world:
        return _lead(config, run, console, world, hooks)


def _lead(given: Config, run: RunDir, console: Console, world: World, hooks: Hooks) -> dict[str, Any]:
    """Train as the leader, together with other ranks if there are any. Return the summary.

    Raises:
        Interrupted: a signal arrived, and the run was saved.
    """
    from mtrl.trainer.data.mixed_sampler import sampler_of
    from mtrl.trainer.loading import pick_device
    from mtrl.trainer.loop import Trainer
    from mtrl.trainer.setup.machine import machine_note, with_machine_settings
    from mtrl.trainer.setup.parts import preparation, set_up

    pick_device(given.model.device)  # raises before any work if there is no such GPU
    task = load_task(given)
    sampler_of(given, task.splits.train)  # raises before a model is loaded
    critic = find_estimator(given.algorithm.advantage_method).needs_critic
    planned = with_steps(given, len(task.splits.train), critic)
    config = with_machine_settings(planned)
    if (epochs := given.trainer.epochs) is not None:
        console.note(f"trainer.epochs={epochs:g}: {config.trainer.max_steps} steps, by {len(task.splits.train)} rows")
    if note := machine_note(planned, config):
        console.note(note)
    hooks.plan(config, console.note, console.warning)
    if (resumed := checkpoint_to_resume(config, run)) is None:
        hooks.at_start(config, task, run.path, console.note, console.warning)
    if serves(config):
        console.note(
            f"the servers of {config.generator.backend} take a minute to start; their output is in {run.engine}"
        )
    with console.progress(*preparation(config)) as bar:
        stored = None if resumed is None else RunDir(resumed.parent.parent).tokenizer
        parts = set_up(config, on_warm_start=partial(shown, bar), task=task, world=world, stored_tokenizer=stored)
    parts.policy.tokenizer.save_pretrained(run.tokenizer)
    with closing(start_followers(config, run, console.warning)) as followers:
        console.banner({**facts(config, parts), **followers.urls()})
        trainer = Trainer(config, parts, run, console, followers.poke, hooks.on_evaluation)
        try:
            summary = _finish(config, run, console, trainer)
        finally:
            parts.rank_group.dismiss()
    shown_run = RunDir(from_here(run.path))
    links = {**shown_paths(shown_run), **followers.urls()}
    console.finish(summary, links, {**hints(given, shown_run), **followers.hints()})
    return summary


def shown(bar: Work, step: int, success: float | None) -> None:
    """Advance the progress bar of the warm start."""
    bar.describe("warm start" if success is None else f"warm start, success {success:.0%}")
    bar.advance()


def _finish(config: Config, run: RunDir, console: Console, trainer: Any) -> dict[str, Any]:
    """Train from the beginning, or from the checkpoint, to the end. Return the summary.

    Raises:
        Interrupted: a signal arrived, and the run was saved.
    """
    if (path := checkpoint_to_resume(config, run)) is not None:
        from mtrl.trainer.progress import changed_rows
        from mtrl.trainer.setup.start import check_start

        if (changed := changes(run.path)) is not None:
            console.warning(f"the folder of the run has changed since the run ended: {changed}")
        checkpoint = intact_checkpoint(path, config, run, console.warning)
        for warning in changed_rows(checkpoint.state.get("rows", {}), trainer.progress.rows):
            console.warning(warning)
        check_start(config, f"resume={config.resume}", checkpoint.state.get("start", ""), trainer.progress.start)
        trainer.resume(checkpoint)
        console.note(f"resumed from {checkpoint.path} at step {trainer.progress.step}")
        if note := adapted_weight(config, trainer.kl.coefficient):
            console.note(note)
    with run.under_way():  # entered only here, so that a refused checkpoint leaves the run unchanged
        run.write_config(config)
        try:
            with settled():
                stopped_by = asyncio.run(trainer.run())
        except PrunedError:
            summarise(trainer, config, run)
            raise
        if stopped_by:
            console.note(f"{stopped_by}: saved at step {trainer.progress.step}; go on with: {resume_command(config)}")
            summarise(trainer, config, run)
            raise Interrupted(stopped_by)
        trainer.learners.export(run.export)
        summary = summarise(trainer, config, run)
        if config.tracker.plots:
            draw_curves(trainer.metrics.read(), run.curves, title(config))
    return summary


def adapted_weight(config: Config, coefficient: float) -> str | None:
    """Return a note that the weight of the KL in a resumed run is the adapted one, with which it goes on, and not the
    configured one; None if they are equal or the weight is fixed."""
    algorithm = config.algorithm
    key = "kl_loss_coef" if algorithm.kl_loss_coef else "kl_reward_coef"
    if algorithm.kl_target is None or coefficient == (given := getattr(algorithm, key)):
        return None
    return (
        f"the weight of the KL goes on at {coefficient:g}, to which algorithm.kl_target={algorithm.kl_target:g} has "
        f"adapted it; algorithm.{key}={given:g} is the weight at the start of a new run"
    )


def checkpoint_to_resume(config: Config, run: RunDir) -> Path | None:
    """Return the checkpoint to resume from; None to start from the beginning, also with `resume=latest` if the run was
    killed before its first checkpoint."""
    if config.resume == "none":
        return None
    return Checkpoints(run.checkpoints).latest() if config.resume == "latest" else find_checkpoint(Path(config.resume))


def intact_checkpoint(path: Path, config: Config, run: RunDir, warn: Callable[[str], None]) -> Checkpoint:
    """Read the checkpoint at `path`, from `checkpoint_to_resume`. If the command does not name this checkpoint itself,
    read the newest intact one of the same folder, and set damaged newer ones of this run aside.

    Raises:
        UserError: the checkpoint of the command is damaged, or no checkpoint is intact.
    """
    if config.resume != "latest" and Path(config.resume) == path:
        return read_checkpoint(path)
    checkpoints = Checkpoints(path.parent)
    checkpoint, broken = checkpoints.read_newest()
    for newer, reason in broken.items():
        warn(f"checkpoint {newer} is skipped ({reason}); the newest intact one is {checkpoint.path}")
        if path.parent == run.checkpoints:  # the folder of another run is not changed
            checkpoints.set_aside(newer)
    return checkpoint


def summarise(trainer: Any, config: Config, run: RunDir) -> dict[str, Any]:
    """Write summary.json, with the first and last evaluation from the logged metrics. Return its contents."""
    rows = [row for row in trainer.metrics.read() if "val/success/mean" in row]
    before = rows[0] if rows and rows[0]["step"] == 0 else {}
    after = rows[-1] if rows else {}
    keys = {"success": "val/success/mean", "success_sampled": "val/success/sampled", "reward": "val/reward/mean"}
    moments = {
        f"{name}_{moment}": row.get(key)
        for name, key in keys.items()
        for moment, row in (("before", before), ("after", after))
    }
    best = trainer.checkpoints.best()
    return run.write_summary(
        {
            **moments,
            "steps": trainer.progress.step,
            "seconds": round(trainer.progress.seconds, 1),
            "seed": config.seed,
            "name": config.name,
            "split": "validation" if trainer.parts.splits.validation else "test",
            "best_checkpoint": str(best) if best else None,
        }
    )


def facts(config: Config, parts: Any) -> dict[str, str]:
    """Return the lines of the banner before the first step: main settings, data, policy and engine."""
    splits = parts.splits
    validation = f", {len(splits.validation)} for its evaluations" if splits.validation else ""
    rows = f"{len(splits.train)} training rows{validation}, {len(splits.test)} held out"
    rows += f", {prompt_of(config)} prompts" if writes_prompts(parts.family) else ""
    ranks = parts.rank_group.world.size
    policy = f"{parts.policy.parameters / 1e6:.2f} M parameters on {parts.policy.device}"
    policy += f", sharded over {ranks} ranks" if ranks > 1 else ""
    for what, parts_of_it in {
        "sequences": config.trainer.sequence_parallel,
        "matrices": config.trainer.tensor_parallel,
        "experts": config.trainer.expert_parallel,
    }.items():
        policy += f", {what} in {parts_of_it} parts" if parts_of_it > 1 else ""
    warm = {"warm start": str(parts.warm_start_result)} if parts.warm_start_result else {}
    return {**run_facts(config), "rows": rows, "policy": policy, **warm, **engine_facts(config)}


def run_facts(config: Config) -> dict[str, str]:
    """Return the banner's lines about the configuration: task, model, algorithm, steps and folder of the run."""
    algorithm, trainer, evaluation = config.algorithm, config.trainer, config.evaluation
    held_out = f"evaluation every {evaluation.every_steps} on {evaluation.rows} held-out rows"
    return {
        "task": described_tasks(config),
        "model": f"{config.model.path or config.model.name} on {config.model.device}, {config.model.dtype}"
        + (f", LoRA rank {config.model.lora_rank}" if config.model.lora_rank else ""),
        "algorithm": f"{algorithm.advantage_method} + {algorithm.loss_fn}, {trainer.prompts_per_step} prompts × "
        f"{algorithm.group_size} trajectories, lr {trainer.optimizer.lr:g}, seed {config.seed}",
        "steps": f"{trainer.max_steps}" + (f", {held_out}" if evaluation.every_steps else ""),
        "run": str(config.run_dir),
    }


def engine_facts(config: Config) -> dict[str, str]:
    """Return the banner's line about the servers; empty for the local engine."""
    if not serves(config):
        return {}
    name = config.generator.backend
    settings = getattr(config.generator, name)
    where = ", ".join(settings.urls) or f"{settings.replicas} of its own"
    return {"engine": f"{name}, servers: {where}; new weights by {settings.weight_sync}"}


def title(config: Config) -> str:
    return f"{config.name}, {config.algorithm.advantage_method} + {config.algorithm.loss_fn}, seed {config.seed}"


def shown_paths(run: RunDir) -> dict[str, str]:
    """Return the files and folders that the last lines name; without `tracker.plots` there are no curves."""
    paths = {
        "curves": run.curves,
        "metrics": run.metrics,
        "trajectories": run.trajectories,
        "model": run.export,
        "checkpoints": run.checkpoints,
    }
    return {name: str(path) for name, path in paths.items() if path.exists()}


def hints(config: Config, run: RunDir) -> dict[str, str]:
    """Return commands that the user can run next."""
    other = "text_to_sql" if config.name != "text_to_sql" else "gsm8k"
    steps, epochs = max(1, 2 * config.trainer.max_steps), config.trainer.epochs
    longer = f"trainer.max_steps={steps}" if epochs is None else f"trainer.epochs={2 * epochs:g}"
    return {
        "see what it did": f"mtrl view {run.path}",
        "what to change next": f"mtrl diagnose {run.path}",
        "another task": f"mtrl train experiment={other}",
        "train on from here": command(config, f"run_dir={run.path}", "resume=latest", longer),
    }


def ended_at_once(end: KeyboardInterrupt, config: Config, run: RunDir) -> EndedAtOnce:
    """Return the exception for a run that a signal ended without saving, with the last checkpoint and the command to
    resume."""
    number = end.number if isinstance(end, EndedAtOnce) else signal.SIGINT
    saved = Checkpoints(run.checkpoints).latest()
    lost = f"the steps after its checkpoint {saved.name} are not saved" if saved else "no step is saved"
    message = f"{signal.Signals(number).name}: the run ended at once, and {lost}; go on with: {resume_command(config)}"
    return EndedAtOnce(number, message)


def resume_command(config: Config) -> str:
    """Return the command that resumes this run."""
    return command(config, f"run_dir={config.run_dir}", "resume=latest")


def command(config: Config, *changes: str) -> str:
    """Return the command of this run with some overrides changed. Its `run_dir` is removed, unless `changes` sets
    one."""
    task = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    flags = config_dir_flags() if HydraConfig.initialized() else []
    changed = {"run_dir", "resume", "sweep", *(key(change) for change in changes)}
    unchanged = [override for override in task if key(override) not in changed]
    return shlex.join([*launcher(), *flags, *unchanged, *changes])


def launcher() -> list[str]:
    """Return the command that starts the same ranks again, without overrides: `mtrl train`, or `torchrun` with its
    options."""
    if not is_launched():
        return ["mtrl", "train"]
    here, everywhere = environment_integer("LOCAL_WORLD_SIZE", "1"), environment_integer("WORLD_SIZE", "1")
    nodes = ["--standalone"] if here == everywhere else [f"--nnodes={everywhere // here}"]
    return ["torchrun", *nodes, f"--nproc-per-node={here}", "-m", "mtrl.main"]


def key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]
