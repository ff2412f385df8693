"""Selection of the folder of a run: a new one, or that of the run that is resumed."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtrl.config.plain_yaml import load_config
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir, such_as
from mtrl.utils.process import launch_id

CHECKPOINTS = "checkpoints"
LAUNCH = "launch.txt"
"""Name of the file, in the folder of a run that torchrun started, that holds the id of the launch."""


def holds_run(folder: Path) -> bool:
    """Return whether the folder holds files of a run."""
    return any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml", "summary.json"))


def has_default_run_dir(cfg: DictConfig) -> bool:
    """Return whether `run_dir` has its default value."""
    raw: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, "run_dir"), resolve=False)
    return raw["run_dir"] == Config.run_dir


def check_named(run_dir: str) -> None:
    """Check that `run_dir` is not empty, which would be the current folder.

    Raises:
        UserError: it is empty.
    """
    if not run_dir.strip():
        raise UserError(f"run_dir={run_dir} names no folder; write run_dir=FOLDER, or leave it out for a new folder")


def settle(cfg: DictConfig) -> list[str]:
    """Replace `run_dir` by the resolved path, with `resume` by the folder of the run to resume. Return warnings.

    Raises:
        UserError: `run_dir` is empty, the folder holds another run, or there is no run to resume.
    """
    check_named(cfg.run_dir)
    warnings = _after_restart(cfg)
    run_dir, by_default = Path(cfg.run_dir), has_default_run_dir(cfg)
    if cfg.resume == "none":
        _refuse_run_in(run_dir)
    elif cfg.resume == "latest":
        if by_default:
            run_dir = newest_run(run_dir.parent)
        elif not holds_run(run_dir):
            # This way a job script can use the same command for the first start and for all restarts.
            warnings.append(f"resume=latest: run_dir={run_dir} holds no run yet, so a new one starts there")
            cfg.resume = "none"
    else:
        owner = owner_of(Path(cfg.resume))
        if by_default:
            run_dir = owner
        elif run_dir.resolve() != owner.resolve():
            _refuse_run_in(run_dir)
    if cfg.resume != "none":
        _refuse_other_task(cfg, run_dir)
        _refuse_other_sources(cfg, run_dir)
        _refuse_other_adapters(cfg, run_dir if cfg.resume == "latest" else owner_of(Path(cfg.resume)))
    if cfg.resume == "latest" and not any((run_dir / CHECKPOINTS).glob("step_*")):  # e.g. after a failed start
        warnings.append(
            f"resume=latest: {run_dir} has no checkpoint yet, so it begins anew; run_dir=FOLDER names another run"
        )
    cfg.run_dir = str(run_dir)
    return warnings


def reserve(run_dir: str, is_named: bool) -> str:
    """Return the folder for a run or a sweep that starts now, marked with the id of its launch.

    Args:
        is_named: whether the command names the folder or the run that it resumes. Otherwise the folder is created; if
            it exists, its name gets a number.
    """
    if not is_named and not is_marked(Path(run_dir)):
        run_dir = claim(run_dir)
    mark(run_dir)
    return run_dir


def mark(run_dir: str) -> None:
    """Write the id of the launch into the folder. Errors are ignored here, since `RunDir.create` reports a folder that
    cannot be created."""
    if (launched := launch_id()) is not None:
        with suppress(OSError):
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            (Path(run_dir) / LAUNCH).write_text(launched + "\n", encoding="utf-8")


def is_marked(run_dir: Path) -> bool:
    """Return whether the folder belongs to an earlier attempt of the same launch of torchrun."""
    launched = launch_id()
    with suppress(OSError):
        return launched is not None and (run_dir / LAUNCH).read_text(encoding="utf-8").strip() == launched
    return False


def _after_restart(cfg: DictConfig) -> list[str]:
    """After a restart by `torchrun --max-restarts`, resume in the folder of the previous attempt, from its last
    checkpoint. torchrun repeats the first command, and a `run_dir` with the time in it would be a new folder. Return
    warnings."""
    run_dir = Path(cfg.run_dir)
    if launch_id() is None or cfg.resume == "latest":
        return []
    if cfg.resume != "none" and (has_default_run_dir(cfg) or run_dir.resolve() == owner_of(Path(cfg.resume)).resolve()):
        return []  # resumes in the folder of another run, from the requested checkpoint
    folders = [run_dir, *(run_dir.parent.iterdir() if run_dir.parent.is_dir() else ())]
    before = next((folder for folder in folders if is_marked(folder)), None)
    if before is None:
        return []
    cfg.run_dir = str(before)
    if not holds_run(before):
        return []
    if cfg.resume == "none" or any((before / CHECKPOINTS).glob("step_*")):
        cfg.resume = "latest"  # without a checkpoint, this starts from the beginning
    return [f"torchrun has started this run again: it goes on in {before}"]


def _refuse_run_in(run_dir: Path) -> None:
    if holds_run(run_dir) and not is_marked(run_dir) and not _ended_at_its_start(run_dir):
        raise UserError(
            f"run_dir={run_dir} already holds a run; continue it with resume=latest, or name another folder"
        )


def _ended_at_its_start(folder: Path) -> bool:
    """Return whether a run started here and recorded nothing, for example because its model could not be loaded. Its
    lock shows whether it is still running."""
    run = RunDir(folder)
    return run.log.exists() and not run.has_records


def _refuse_other_task(cfg: DictConfig, run_dir: Path) -> None:
    """Check that the run is resumed with the task and the kind of model that it started with."""
    if not (run_dir / "config.yaml").exists():
        return
    began = load_config(run_dir / "config.yaml")
    for path in ("environment.name", "environment.target", "model.name"):
        was, now = OmegaConf.select(began, path), OmegaConf.select(cfg, path)
        if was != now:
            raise UserError(
                f"resume={cfg.resume}: the run in {run_dir} has {path}={was}, and this command has {now}; "
                f"repeat the choices of its first command, such as experiment={OmegaConf.select(began, 'name')}"
            )


def _refuse_other_sources(cfg: DictConfig, run_dir: Path) -> None:
    """Check that the run is resumed with the sources that it started with; their weights may change."""
    if not (run_dir / "config.yaml").exists():
        return
    began = load_config(run_dir / "config.yaml")
    was, now = (
        {name: OmegaConf.select(tree, f"environments.{name}.environment") for name in tree.get("environments") or {}}
        for tree in (began, cfg)
    )
    if was != now:
        raise UserError(
            f"resume={cfg.resume}: the run in {run_dir} has the sources {', '.join(was) or 'none'} in environments, "
            f"and this command has {', '.join(now) or 'none'} or other tasks for them; repeat the environments of its "
            "first command, where only weights may change"
        )


def _refuse_other_adapters(cfg: DictConfig, owner: Path) -> None:
    """Check that the adapters have the same `lora_rank` and `lora_alpha` as before. A checkpoint's weights do not
    contain `lora_alpha`, so another value would silently change the model."""
    if not (owner / "config.yaml").exists():
        return
    began = load_config(owner / "config.yaml")
    keys = ["model.lora_rank", "model.lora_alpha"] if cfg.model.lora_rank else ["model.lora_rank"]
    for key in keys:
        was, now = OmegaConf.select(began, key), OmegaConf.select(cfg, key)
        if was not in (None, now):
            raise UserError(
                f"resume={cfg.resume}: the run in {owner} has {key}={was}, and this command has {now}; repeat "
                f"{key}={was}, or start a new run"
            )


def newest_run(folder: Path) -> Path:
    """Return the run in `folder` whose files were written last.

    Raises:
        UserError: the folder holds no run.
    """
    runs = [run for run in folder.iterdir() if holds_run(run)] if folder.is_dir() else []
    if not runs:
        raise UserError(f"resume=latest: there is no run in {folder}; start one with resume=none, or set run_dir")
    return max(runs, key=_last_written)


def _last_written(run: Path) -> float:
    written = [run / name for name in ("metrics.jsonl", "config.yaml", "summary.json")]
    return max(path.stat().st_mtime for path in written if path.exists())


def owner_of(path: Path) -> Path:
    """Return the folder of the run for a path to a checkpoint or to the run itself.

    Raises:
        UserError: the path does not exist, or is neither.
    """
    if not path.is_dir():
        problem = "is a file, and no run or checkpoint" if path.exists() else "does not exist"
        raise UserError(f"resume={path} {problem}; write none, latest, a run folder or RUN/{CHECKPOINTS}/step_N")
    if holds_run(path) or (path / CHECKPOINTS).is_dir():
        return path
    if path.parent.name == CHECKPOINTS:
        return path.parent.parent
    raise UserError(
        f"resume={path} is neither a run nor a checkpoint; write RUN/{CHECKPOINTS}/step_N or a run folder"
        f"{such_as(path)}"
    )


def claim(run_dir: str) -> str:
    """Create the folder of a new run and return it. If the folder exists, a number is appended, since another run may
    have started in the same second."""
    for number in count(1):
        folder = Path(run_dir if number == 1 else f"{run_dir}_{number}")
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")
