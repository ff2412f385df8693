"""The available trackers, and the start of the followers of a run."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from mtrl.config.keys import flat
from mtrl.config.messages import unknown_choice
from mtrl.errors import UserError, missing_extra
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.trackers.backend import BackendInputs, Identity, TrackerBackend
from mtrl.trackers.folder import Reading
from mtrl.trackers.follower import Follower
from mtrl.trackers.followers import Followers
from mtrl.trackers.receipts import BusyError, folder_of, read_remote, run_card
from mtrl.trackers.to_mlflow import ToMlflow
from mtrl.trackers.to_tensorboard import ToTensorboard
from mtrl.trackers.to_wandb import ToWandb
from mtrl.utils.provenance import git_state, versions

if TYPE_CHECKING:
    from mtrl.config.schema import Config, TrackerConfig


TRACKERS: dict[str, Callable[[BackendInputs], TrackerBackend]] = {
    ToMlflow.name: ToMlflow,
    ToWandb.name: ToWandb,
    ToTensorboard.name: ToTensorboard,
}
"""Backends by tracker name. A backend imports its package only when it is opened."""


def check_trackers(cfg: DictConfig) -> list[str]:
    """Refuse trackers that cannot work; return warnings about settings without effect.

    Raises:
        UserError: A name is unknown, a package is missing, or a value is invalid.
    """
    tracker = cfg.tracker
    for name in tracker.report_to:
        check_tracker(name)
    uri = tracker.mlflow.uri
    if uri and not re.match(r"\w[\w+.-]*://|databricks|arn:", uri):
        raise UserError(
            f"tracker.mlflow.uri={uri} is no address; write http://HOST:PORT of a server, or sqlite:///FILE of a file"
        )
    return [f"{setting} has no effect with tracker.report_to={list(tracker.report_to)}" for setting in _idle(tracker)]


def check_tracker(name: str) -> None:
    """Refuse a tracker that cannot work.

    Raises:
        UserError: The tracker does not exist, or its package is not installed.
    """
    if name not in TRACKERS:
        raise unknown_choice("tracker.report_to", name, tuple(TRACKERS))
    if find_spec(name) is None:  # each package has the name of its tracker
        raise {
            "mlflow": missing_extra("mlflow", "mlflow"),
            "wandb": missing_extra("wandb", "wandb"),
            "tensorboard": missing_extra("tensorboard", "tensorboard"),
        }[name]


def _idle(tracker: DictConfig) -> list[str]:
    """Return the changed settings of trackers that are not in `tracker.report_to`."""
    from mtrl.config.schema import TrackerConfig

    default = TrackerConfig()
    names = set(tracker.report_to)
    changed = [
        f"tracker.{section}.{key}={value}"
        for section in ("mlflow", "wandb")
        if section not in names
        for key, value in tracker[section].items()
        if value != getattr(getattr(default, section), key)
    ]
    if not names & {"mlflow", "wandb"} and tracker.project != default.project:
        changed.append(f"tracker.project={tracker.project}")
    if not names and tracker.trajectories != default.trajectories:
        changed.append(f"tracker.trajectories={tracker.trajectories}")
    return changed


def start_followers(config: Config, run: RunDir, warn: Callable[[str], Any]) -> Followers:
    """Follow `run` with every tracker of `tracker.report_to`, each in a thread of its own.

    The thread that pokes and closes the followers calls `warn`. This function does not wait for a tracker.
    """
    followers = []
    for name in dict.fromkeys(config.tracker.report_to):
        try:
            followers.append(follower_of(name, run, config.tracker, is_live=True))
        except BusyError:
            warn(f"{name} is already being sent this run by another process")
        except OSError as error:
            warn(f"{name} receives nothing of this run, because {folder_of(run)} cannot be written ({error.strerror})")
    return Followers(followers, warn)


def follower_of(name: str, run: RunDir, tracker: TrackerConfig, is_live: bool = False) -> Follower:
    """Return the follower of one tracker.

    Args:
        is_live: This process is the run, so its source tree and packages are those of the run.

    Raises:
        BusyError: Another process holds the journal of this tracker.
        OSError: The folder of the run cannot be written.
    """
    backend = TRACKERS[name](BackendInputs(run, _identity(run, is_live), tracker))
    reading = Reading(tracker.trajectories, Run(run.path).thresholds, episodes_at_once=backend.episodes_at_once)
    return Follower(backend, run, backend.place.identity.started, reading)


def mlflow_url(config: Config, run: RunDir) -> str:
    """Return the address of the run in MLflow; before the run has arrived there, the address of the server."""
    backend = ToMlflow(BackendInputs(run, _identity(run, False), config.tracker))
    return backend.url(read_remote(folder_of(run), backend.name, backend.destination))


def _identity(run: RunDir, is_live: bool) -> Identity:
    """Return the identity of the run from its `run.json`, which the first caller writes."""

    def make() -> dict[str, Any]:
        found = {"git": git_state(), "versions": versions()} if is_live else Run(run.path).summary
        began = time() if is_live else _first_written(run)
        known = {key: found.get(key) for key in ("git", "versions")}
        return {"id": uuid.uuid4().hex, "started": round(1000 * began), **known}

    stored = Run(run.path).stored_config.tree
    card = run_card(folder_of(run), make)
    environment = stored.get("environment") or {}
    facts = {
        "folder": str(run.path.resolve()),
        "name": stored.get("name"),
        "seed": stored.get("seed"),
        "task": environment.get("name"),
        **flat({"git": card.get("git"), "versions": card.get("versions")}),
    }
    name = f"{stored.get('name', 'run')} {run.path.resolve().name}"
    known = {key: str(value) for key, value in facts.items() if value is not None}
    return Identity(card["id"], name, card["started"], known)


def _first_written(run: RunDir) -> float:
    files = [path for path in Path(run.path).iterdir() if path.is_file()]
    return min((path.stat().st_mtime for path in files), default=time())
