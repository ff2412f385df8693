"""The folder of a run: names and meaning of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.errors import UserError
from mtrl.record.checksums import SUMS, changes, damage, write_checksums
from mtrl.utils.files import plain, replace_text, to_strict_json
from mtrl.utils.provenance import git_state, versions

if TYPE_CHECKING:
    from mtrl.config.schema import Config

SUMMARY_KEYS = (
    "success_before",
    "success_after",
    "success_sampled_before",
    "success_sampled_after",
    "reward_before",
    "reward_after",
    "steps",
    "seconds",
    "seed",
    "git",
    "versions",
)
"""Keys of every summary.json; the value is null if the run did not measure it."""


def such_as(folder: Path) -> str:
    """Return `, such as RUN` with the newest run up to two levels below `folder`, for users who named the folder of
    all runs; empty if there is no run."""
    below = [file for levels in ("*", "*/*") for file in folder.glob(f"{levels}/config.yaml")]
    runs = [file.parent for file in below if not RunDir(file.parent).is_evaluation]
    return f", such as {max(runs, key=lambda run: run.stat().st_mtime)}" if runs else ""


class RunDir:
    """Paths of the files and folders that a run writes::

    config.yaml      resolved configuration        checkpoints/   checkpoints to resume from
    metrics.jsonl    one row per step              export/        final model as a Hugging Face folder
    trajectories/    trajectories, JSONL           curves.png     main curves of the run
    run.log          console output and log        summary.json   final numbers
    preflight.json   findings of the checks at the start
    timeline.jsonl   spans of the phases of a step   alarms.jsonl   symptoms reported during the run
    rows.jsonl       results of the training rows, by step
    tokenizer/       tokenizer of the token ids    trackers/      receipts of the trackers, if there are any
    trace_step_N.json.gz, .txt   trace of one step (trainer.profile_step)
    launch.txt       launch of torchrun that the run belongs to
    status.txt       running, finished or stopped; still "running" after a kill
    job.json         outcome of the run as a job of a sweep, if it is one
    SHA256SUMS       checksums of a finished run's files that do not change later; a checkpoint has its own
    spending/        requests to endpoints so far, and their cost
    engine/          output of the engine's servers, if it has any
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def engine(self) -> Path:
        return self.path / "engine"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def status(self) -> Path:
        return self.path / "status.txt"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def checksums(self) -> Path:
        return self.path / SUMS

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.jsonl"

    @property
    def rows(self) -> Path:
        return self.path / "rows.jsonl"

    @property
    def alarms(self) -> Path:
        return self.path / "alarms.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def spending(self) -> Path:
        return self.path / "spending"

    @property
    def is_evaluation(self) -> bool:
        """Whether this is the folder of an evaluation, which has the same layout as the folder of a run."""
        return (self.path / "models.json").is_file()

    @property
    def has_records(self) -> bool:
        """Whether the run has written metrics, a summary, trajectories or checkpoints."""
        files, folders = (self.metrics, self.summary), (self.trajectories, self.checkpoints)
        return any(file.exists() for file in files) or any(any(folder.glob("*")) for folder in folders)

    def create(self, resume: bool = False) -> RunDir:
        """Create the folder and return this object. `export/` is created only with the export, so that an empty folder
        is never mistaken for a model.

        A folder that already holds a run is refused unless the run is resumed, because two runs in one file of metrics
        could not be distinguished.
        """
        if not resume and (self.metrics.exists() or self.summary.exists()):
            raise UserError(
                f"run_dir={self.path} already holds a run; continue it with resume=latest or name another folder"
            )
        try:
            for folder in (self.trajectories, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir={self.path} cannot be made ({error.strerror}); name another folder") from error
        return self

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Write into status.txt that the run is running, and at the end whether it finished or stopped. Checksums of
        an earlier end are removed."""
        replace_text(self.status, "running\n")
        self.checksums.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            with suppress(OSError):  # a full disk may be the reason for the stop
                replace_text(self.status, "stopped\n")
            raise
        replace_text(self.status, "finished\n")

    def write_checksums(self) -> None:
        """Write the checksums of the run's files, after the last write to them. Left out are checkpoints, which have
        their own checksums, the files of trackers, which may change later, run.log, to which a refused resume appends,
        and job.json, which the sweep writes when the run has ended."""
        folders = (self.trajectories, self.export, self.tokenizer, self.spending, self.engine)
        files = chain(self.path.iterdir(), *(folder.rglob("*") for folder in folders))
        others = (self.checksums, self.log, self.job)
        ours = (file for file in files if file.is_file() and not file.name.startswith(".") and file not in others)
        write_checksums(self.path, ours)

    def changes(self) -> str | None:
        """Return a description of the files of a finished run, including its checkpoints, that have changed since they
        were written; None if no file has changed or the run has no checksums."""
        if not self.checksums.is_file():
            return None
        found = [changes(self.path)]
        for checkpoint in sorted(path for path in self.checkpoints.glob("step_*") if path.is_dir()):
            if damaged := damage(checkpoint):
                found.append(f"checkpoints/{checkpoint.name}: {damaged}")
        return "; ".join(filter(None, found)) or None

    def write_config(self, config: Config | Any) -> None:
        """Write config.yaml with every interpolation resolved, so that the run can be repeated anywhere."""
        from omegaconf import OmegaConf

        from mtrl.config.plain_yaml import with_end

        # A tree of plain values has no types to check, and is made in a quarter of the time of a typed one.
        tree = config if OmegaConf.is_config(config) else OmegaConf.create(asdict(config))
        replace_text(self.config, with_end(OmegaConf.to_yaml(tree, resolve=True)))

    def write_summary(self, values: dict[str, Any]) -> dict[str, Any]:
        """Write summary.json, whole or not at all, and return its content. `git` and `versions` are added."""
        known = {**dict.fromkeys(SUMMARY_KEYS), "git": git_state(), "versions": versions()}
        summary = plain({**known, **values})
        replace_text(self.summary, to_strict_json(summary, indent=2) + "\n")
        return summary
