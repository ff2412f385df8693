"""Run of one evaluation, from its models to the files of its report."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from mtrl.config.derived import prompt_of, serves
from mtrl.config.mixture import described_tasks
from mtrl.config.schema import Config
from mtrl.console.console import Console
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.engine import KEY
from mtrl.environments.factory import Task, writes_prompts
from mtrl.evaluation.ready_models import ReadyModel, endpoint_model, local_model, served_model
from mtrl.evaluation.report import build_report
from mtrl.evaluation.report_files import write_report
from mtrl.evaluation.rollouts import ModelRollouts, Source
from mtrl.evaluation.runner import EvaluationRunner, all_at_once, kinds_of
from mtrl.evaluation.store import Store
from mtrl.evaluation.table import tables_of, usage_lines
from mtrl.record.run_dir import RunDir
from mtrl.rewards.judge import judge_metrics, judge_spending, record_spending
from mtrl.scoring.measures import val_metrics
from mtrl.scoring.sources import val_metrics_of_sources
from mtrl.trackers import start_followers
from mtrl.types import Row
from mtrl.utils.files import replace_text, to_strict_json
from mtrl.utils.text import from_here


@dataclass
class Evaluation:
    """Inputs and outputs of one evaluation."""

    config: Config
    task: Task
    rows: list[Row]
    sources: list[Source]
    folder: Path
    console: Console
    budget: Budget = field(init=False)
    """Budget of all endpoints, with one account per model."""

    def __post_init__(self) -> None:
        """Read the earlier spending from its file.

        Raises:
            UserError: The file cannot be read.
        """
        endpoint, path = self.config.evaluation.endpoint, RunDir(self.folder).spending / "evaluation.endpoint.json"
        self.budget = Budget(KEY, endpoint.price, endpoint.budget, path)

    def run(self) -> None:
        """Run all episodes, and write all files.

        Raises:
            TooManyFailedError, UserError: See `EvaluationRunner.run`.
            BudgetSpentError: A budget is spent. There is no report, but the finished episodes are in the store.
        """
        run = RunDir(self.folder)
        with (
            closing(start_followers(self.config, run, self.console.warning)) as followers,
            run.under_way(),  # inside, so that the trackers learn the final status
            record_spending(run.spending),
        ):
            self.console.banner(self._facts(), "mtrl evaluation")
            paths = self._evaluate()
        for where in [*paths, *followers.urls().values()]:
            self.console.note(str(from_here(where) if isinstance(where, Path) else where))

    def _evaluate(self) -> list[Path]:
        """Run, write and show the evaluation. Return the paths of the report and the trajectories."""
        found = asyncio.run(self._play())
        models = [found[source.label] for source in self.sources]
        self._write_metrics(models)
        report = build_report(models, self.config, self.task.family, judge_spending())
        paths = write_report(report, self.folder)
        for table in tables_of(report):
            self.console.show(table)
            self.console.show(Text())
        for line in usage_lines(report):
            self.console.note(line)
        self._tell_failures(models)
        return [*paths, RunDir(self.folder).trajectories]

    async def _play(self) -> dict[str, ModelRollouts]:
        """Run all endpoints concurrently, then the local models one after another, because each uses the whole machine.
        Return the rollouts by label."""
        run = RunDir(self.folder)
        runner = EvaluationRunner(
            self.config,
            self.task.family,
            kinds_of(self.config.evaluation, self.rows),
            Store(run.trajectories),
            self.budget,
            self.console,
        )
        total = sum(kind.episodes for kind in runner.kinds) * len(self.sources)
        remote = [source for source in self.sources if source.kind == "endpoint"]
        with self.console.progress("evaluation", total) as whole:
            done = await all_at_once(
                runner.run(source, partial(endpoint_model, source, self.config, self.task, self.budget), whole)
                for source in remote
            )
            if self.budget.closed is not None:
                raise self.budget.closed
            for source in self.sources:
                if source not in remote:
                    done.append(await runner.run(source, partial(self._local, source), whole))
        return {model.label: model for model in done}

    def _local(self, source: Source) -> ReadyModel:
        run, known = RunDir(self.folder), (source, self.config, self.task, self.rows)
        model = served_model(*known, run.engine) if serves(self.config) else local_model(*known)
        tokenizer = run.tokenizer
        if not tokenizer.exists():
            model.tokenizer.save_pretrained(tokenizer)
        return model

    def _write_metrics(self, models: list[ModelRollouts]) -> None:
        """Write metrics.jsonl with one row per step, as in a run. The first model has the metric names of a run's
        evaluations; names of other models have their label as a prefix: `base/val/success/mean`. Data rows with a
        failed episode are left out. Usage and cost of endpoints and judges are `endpoint/…` and `reward/<judge>/…`."""
        rows: dict[int, dict[str, Any]] = {}
        for model in models:
            failed = {t.group_id for t in model.failures()}
            whole = {kind: [g for g in groups if g.group_id not in failed] for kind, groups in model.groups.items()}
            if whole["greedy"]:
                prefix = "" if model is models[0] else f"{model.label}/"
                settings, family = self.config.evaluation, self.task.family
                metrics = val_metrics(whole, settings, family)
                metrics |= val_metrics_of_sources(whole, tuple(self.task.sources), settings, family)
                metrics["eval/reward"] = metrics["val/reward/mean"]  # the name that SageMaker's evaluator reports
                metrics |= {f"endpoint/{name}": value for name, value in model.usage.items()}
                metrics |= judge_metrics() if model is models[0] else {}
                row = rows.setdefault(model.source.step, {"step": model.source.step})
                row |= {prefix + name: value for name, value in metrics.items()}
        text = "".join(to_strict_json(rows[step]) + "\n" for step in sorted(rows))
        replace_text(RunDir(self.folder).metrics, text)

    def _tell_failures(self, models: list[ModelRollouts]) -> None:
        for model in models:
            if failed := model.failures():
                episodes = "1 failed episode is" if len(failed) == 1 else f"{len(failed)} failed episodes are"
                cause = (failed[0].error or failed[0].stop_reason).partition("\n")[0]
                self.console.warning(
                    f"{model.label}: {episodes} left out of the rates; the same command "
                    f"with evaluation.output={from_here(self.folder)} runs them again (the first cause: {cause})"
                )

    def _facts(self) -> dict[str, str]:
        """Return the facts of the banner."""
        config, evaluation = self.config, self.config.evaluation
        sampled = f", {evaluation.samples_per_row} x {min(evaluation.sampled_rows, len(self.rows))} rows sampled"
        facts = {
            "task": described_tasks(config),
            "rows": f"{min(evaluation.rows, len(self.rows))} of {evaluation.split}, greedy"
            + (sampled if evaluation.sampled_rows else "")
            + (f", {prompt_of(config)} prompts" if writes_prompts(self.task.family) else ""),
        }
        for number, source in enumerate(self.sources):
            facts["model" if number == 0 else f"against {number}"] = described(source)
        return {**facts, "output": str(from_here(self.folder))}


def described(source: Source) -> str:
    """Describe the source of the weights in one line."""
    where = f"{source.model}@{source.url}" if source.kind == "endpoint" else source.path
    step = f", step {source.step}" if source.step else ""
    return f"{source.label}: {source.kind}{step}, {where}"
