"""MLflow: metrics, parameters and artifacts in a run, and a trace for every trajectory.

Every call goes to the client of this run, so MLflow's global state does not change.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mtrl.config.secret_names import without_password
from mtrl.errors import UserError
from mtrl.trackers.backend import BackendInputs, Identity, RefusedItemError
from mtrl.trackers.items import Artifact, Ended, MetricsRow, RunSettings, SentTrajectory
from mtrl.trackers.mlflow_names import LONGEST_PARAM, LONGEST_TAG, safe_name, short_text
from mtrl.trackers.mlflow_traces import TraceWriter
from mtrl.trackers.receipts import Receipts

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DATABASE = "mlflow.db"
METRICS_AT_ONCE = 1000
WORDS_AT_ONCE = 100
"""Maximum number of parameters or of tags per call."""
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Defaults of MLflow's environment variables. MLflow retries little because the follower retries itself, sends no
telemetry, and does not print the address of the run because mtrl prints it."""
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "REQUEST_LIMIT_EXCEEDED_SIZE", "MALFORMED_REQUEST")


class ToMlflow:
    """One run of a tracking server or of an SQLite file."""

    name = "mlflow"
    episodes_at_once: int | None = 8
    is_buffered = False

    def __init__(self, place: BackendInputs):
        self.place = place
        self.project = place.tracker.mlflow.experiment or place.tracker.project
        self._identity: Identity = place.identity
        self._client: MlflowClient
        self._traces: Any
        self._writer: TraceWriter
        self._in_doubt = True
        """Whether the last call failed or was made by another process, so the next rows may have arrived already."""

    # -- destination -------------------------------------------------------------------------------------------------

    @property
    def uri(self) -> str:
        """Address of the tracking server, or of the SQLite file beside the folders of the runs."""
        return self.place.tracker.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI") or self._own_database

    @property
    def _shown(self) -> str:
        """`uri` without its password, which MLFLOW_TRACKING_URI may contain."""
        return without_password(self.uri)

    @property
    def _own_database(self) -> str:
        return f"sqlite:///{self.place.folder / DATABASE}"

    @property
    def destination(self) -> str:
        uri = f"beside the run: {DATABASE}" if self.uri == self._own_database else self._shown
        return f"{uri} {self.project}"

    def url(self, remote: dict[str, str]) -> str:
        base = self._shown.rstrip("/") if self.uri.startswith("http") else "http://127.0.0.1:5000"
        if "run_id" not in remote:
            return base
        return f"{base}/#/experiments/{remote['experiment_id']}/runs/{remote['run_id']}"

    def hint(self, remote: dict[str, str]) -> str:
        return (
            "" if self.uri.startswith("http") else shlex.join(["mlflow", "server", "--backend-store-uri", self._shown])
        )

    # -- the run -----------------------------------------------------------------------------------------------------

    def open(self, receipts: Receipts, first_step: int) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracing.client import TracingClient
        from mlflow.tracking import MlflowClient

        for logger in ("mlflow", "alembic"):  # they log the creation of an SQLite file
            logging.getLogger(logger).setLevel(logging.WARNING)
        self._in_doubt = True
        self._client = MlflowClient(tracking_uri=self.uri)
        self._traces = TracingClient(self.uri)
        if "run_id" not in receipts.remote:
            receipts.remember(**self._find_or_make())
        run = self._client.get_run(receipts.remote["run_id"])
        if run.info.lifecycle_stage != "active":
            raise UserError(
                f"the MLflow run {run.info.run_id} was deleted; restore it, or remove {receipts.path} to send it again"
            )
        if run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id = run.info.run_id
        self._writer = TraceWriter(self._identity.id, run.info.run_id, run.info.experiment_id)

    def _find_or_make(self) -> dict[str, str]:
        """Return the run that carries our id, or create it. It exists already if a kill came before its receipt."""
        experiment = self._experiment()
        known = self._client.search_runs([experiment], f"tags.`mtrl.run` = '{self._identity.id}'", max_results=1)
        run = known[0] if known else self._make(experiment)
        return {"run_id": run.info.run_id, "experiment_id": experiment}

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        for _ in range(2):
            if known := self._client.get_experiment_by_name(self.project):
                return known.experiment_id
            try:
                # With an SQLite file, MLflow would put the artifacts into the current working directory.
                local = self.uri.startswith("sqlite:")
                beside = (
                    (self.place.folder / "mlflow_artifacts").as_uri() + f"/{quote(self.project)}" if local else None
                )
                return self._client.create_experiment(self.project, artifact_location=beside)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run created it first
                    raise
        raise UserError(f"the MLflow experiment {self.project} was deleted; restore it, or set another tracker.project")

    def _make(self, experiment: str) -> Any:
        identity = self._identity
        tags = {
            "mtrl.run": identity.id,
            "mlflow.source.name": "mtrl train",
            "mlflow.source.type": "LOCAL",
            **{f"mtrl.{name}": short_text(value, LONGEST_TAG) for name, value in identity.facts.items()},
        }
        if commit := identity.facts.get("git.commit"):
            tags["mlflow.source.git.commit"] = commit
        return self._client.create_run(experiment, identity.started, tags, identity.name)

    # -- sending -----------------------------------------------------------------------------------------------------

    def send_settings(self, settings: RunSettings) -> None:
        """Send the settings as parameters. MLflow stores the first value of each parameter, so a value that a
        resumption changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        values = {safe_name(name): short_text(value, LONGEST_PARAM) for name, value in settings.values.items()}
        new = [Param(name, value) for name, value in values.items() if name not in known]
        changed = [RunTag(f"changed.{name}", v) for name, v in values.items() if known.get(name, v) != v]
        for start in range(0, len(new), WORDS_AT_ONCE):
            self._batch(params=new[start : start + WORDS_AT_ONCE])
        for start in range(0, len(changed), WORDS_AT_ONCE):
            self._batch(tags=changed[start : start + WORDS_AT_ONCE])

    def send_rows(self, rows: Sequence[MetricsRow]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(safe_name(name), float(value), row.milliseconds, row.step)
            for row in self._unknown(rows)
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(metrics), METRICS_AT_ONCE):
            self._batch(metrics=metrics[start : start + METRICS_AT_ONCE])
        self._in_doubt = False

    def _unknown(self, rows: Sequence[MetricsRow]) -> Iterator[MetricsRow]:
        """Yield the rows whose last metric MLflow does not have: earlier metrics of a row may be in a batch before. It
        is queried only after a failure or a kill, because otherwise it has none of the rows."""
        histories: dict[str, set[tuple[int, float]]] = {}
        for row in rows:
            last = next(reversed(row.metrics), "")
            if self._in_doubt and (name := safe_name(last)):
                if name not in histories:
                    history = self._client.get_metric_history(self._run_id, name)
                    histories[name] = {(metric.step, metric.value) for metric in history}
                if (row.step, row.metrics[last]) in histories[name]:
                    continue
            yield row

    def _batch(self, **what: Any) -> None:
        self._in_doubt = True
        with _Refusals():
            self._client.log_batch(self._run_id, **what)

    def send_episodes(self, episodes: Sequence[SentTrajectory]) -> None:
        try:
            spans = [span for episode in episodes for span in self._writer.spans(episode)]
            infos = [self._writer.info(episode) for episode in episodes]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise RefusedItemError(f"it cannot be converted to a trace ({type(error).__name__}: {error})") from error
        with _Refusals():
            for info in infos:  # before the spans, because MLflow is slow in the other order
                self._traces.start_trace(info)
            try:
                self._traces.log_spans(self._writer.experiment, spans)
            except NotImplementedError as error:
                raise RefusedItemError(
                    "this MLflow server is too old to take the spans of a trace; update it"
                ) from error

    def send_artifact(self, artifact: Artifact) -> None:
        with _Refusals():
            self._client.log_artifact(self._run_id, str(artifact.path))

    def send_ended(self, ended: Ended) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ended.finished else "KILLED")

    def close(self) -> None:
        """Do nothing: everything has arrived when its call returns."""


class _Refusals:
    """Turns a permanent refusal of MLflow into `RefusedItemError`; other errors, such as no answer, pass through."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if getattr(error, "error_code", None) in REFUSALS:
            raise RefusedItemError(str(error)) from error
