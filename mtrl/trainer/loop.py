"""The training loop: rollout, credit, update and publication of weights in every step, with evaluations and checkpoints
at intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from mtrl.algorithms.batch import Ragged
from mtrl.algorithms.kl import KlController
from mtrl.algorithms.signal import signal_metrics
from mtrl.config.derived import overlaps, ranks_per_batch, serves
from mtrl.config.schema import Config
from mtrl.console.console import Console
from mtrl.console.progress import Work
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.live import Watch
from mtrl.errors import JobLost, RunEndedError
from mtrl.record.metrics import MetricsLog
from mtrl.record.row_results import RowResults
from mtrl.record.run_dir import RunDir
from mtrl.record.timeline import Timeline
from mtrl.record.trace import step_trace
from mtrl.record.trajectories import remove_later, write_groups
from mtrl.rewards.judge import judge_metrics
from mtrl.rewards.mixture import make_composer
from mtrl.scoring.agreement import Thresholds, disagreements
from mtrl.scoring.heldout import HeldOut
from mtrl.trackers.tracker import Tracker
from mtrl.trainer.checkpoint.checkpoint import Checkpoint, Checkpoints
from mtrl.trainer.data.experience import (
    Collector,
    Experience,
    NoSignalError,
    StoppedError,
    SymptomError,
    of_sources,
)
from mtrl.trainer.data.mixed_sampler import sampler_of
from mtrl.trainer.data.samples import Credited, credit_by_rewards, note_advantages, note_logprobs
from mtrl.trainer.data.stream import Stream
from mtrl.trainer.flops import peak_flops
from mtrl.trainer.loading import compute_dtype
from mtrl.trainer.progress import RunProgress, digests
from mtrl.trainer.publisher import Publisher
from mtrl.trainer.rollout_metrics import role_metrics, rollout_metrics, source_metrics, staleness_metrics
from mtrl.trainer.setup.engine import colocated
from mtrl.trainer.setup.frozen import self_play_rows
from mtrl.trainer.setup.parts import RunParts
from mtrl.trainer.setup.servers import are_external, make_canary
from mtrl.trainer.setup.teacher import make_distillation
from mtrl.trainer.setup.workers import rollouts_of
from mtrl.trainer.throughput import Throughput, peak_memory
from mtrl.trainer.update.critic import Critic, credit_by_critic
from mtrl.trainer.update.kl_penalty import KlPenalty
from mtrl.trainer.update.update import Updater, UpdateResult
from mtrl.trainer.work_thread import WorkThread
from mtrl.types import Group, Row
from mtrl.utils.signals import Interrupt

SAVED_SECONDS = 0.02
"""Interval between two checks whether the last checkpoint is on the disk, in seconds."""


class Trainer:
    """Leads a run: rollouts and updates alternate, or overlap if the configuration allows stale tokens."""

    def __init__(
        self,
        config: Config,
        parts: RunParts,
        run: RunDir,
        console: Console,
        on_row: Callable[[], None] = lambda: None,
        on_evaluation: Callable[[int, dict[str, Any]], None] = lambda step, row: None,
    ):
        """Create the parts of the loop.

        Args:
            on_row: called when new data is in the folder of the run.
            on_evaluation: called with step and metrics after each evaluation. From step 1 on it may raise
                `RunEndedError`; the run is then saved and ends.
        """
        self.config, self.parts, self.run_dir, self.console = config, parts, run, console
        self.on_row, self.on_evaluation = on_row, on_evaluation
        self.progress = RunProgress(start=parts.start_digest, rows=digests(parts.splits))
        self.rows, self.composer = sampler_of(config, parts.splits.train), make_composer(config)
        self.rollouts = rollouts_of(parts.loop, parts.engine, config)
        self.rollouts.pauses = self.rows.pauses
        rows = self_play_rows(self.rows.next, config), self._note_success
        producer_args = (config, self.rollouts, self.composer, parts.family, parts.sampling, *rows)
        self.experience = Stream(*producer_args, self._note_rollouts) if overlaps(config) else Collector(*producer_args)
        self.held_out = HeldOut(
            config.evaluation,
            parts.family,
            parts.splits.held_out,
            self.rollouts,
            self.experience.reward_and_score,
            parts.eval_sampling,
            tuple(config.environments),
        )
        waits = serves(config) or config.distillation.teacher.url is not None  # for servers, or for the teacher
        self.work_thread = WorkThread(overlaps(config) or waits or config.rollouts.workers > 0)
        algorithm = config.algorithm
        self.kl = KlController(
            algorithm.kl_loss_coef or algorithm.kl_reward_coef, algorithm.kl_target, algorithm.kl_horizon
        )
        self.learners, dump = parts.learners, run.path / "nonfinite_batch.jsonl"
        self.publisher = Publisher(
            parts.engine,
            self.learners,
            self.work_thread,
            parts.sends_weights,
            make_canary(config, parts, parts.splits.train, self.learners.logprobs, self.work_thread),
            are_external(config),
            colocated(config, parts.engine, parts.sends_weights),
        )
        self.updater = Updater(config, self.learners, dump, self.kl)
        self.critic = Critic(config, self.learners, dump) if parts.learner.critic else None
        self.kl_penalty = None
        if algorithm.kl_reward_coef:
            self.kl_penalty = KlPenalty(self.learners, self.kl, config.trainer.max_tokens_per_microbatch)
        self.distillation = make_distillation(config, self.learners, parts.served_teacher, run.spending)
        settings = config.trainer.checkpoint
        self.checkpoints = Checkpoints(run.checkpoints, settings.keep_last, settings.keep_best)
        self.saved_step = 0
        """Step of the newest checkpoint. Step 0 is never saved, since a new run can repeat it."""
        self.thresholds = Thresholds.of(config.evaluation)
        # With a critic there is no MFU: its FLOPs are not counted, but its time is.
        peak = None if parts.learner.critic else peak_flops(parts.policy.device, compute_dtype(config))
        self.throughput = Throughput(peak and peak * ranks_per_batch(config.trainer))
        self.timeline = Timeline(run.timeline)
        self.row_results = RowResults(run.rows)
        self.metrics = MetricsLog(run.metrics, console.warning)
        self.tracker = Tracker([self.metrics], console.warning)

    async def run(self) -> str | None:
        """Train up to `max_steps` and save the last step. Return the name of the signal that stopped the run early, or
        None."""
        self.timeline.start(self.progress.step, self.progress.seconds)
        self.row_results.start(self.progress.step, self.rows.described())
        self._remove_later_steps()
        self.watch = Watch(self.config, self.run_dir)
        total = self.config.trainer.max_steps
        stop = partial(asyncio.get_running_loop().call_soon_threadsafe, self._stop)
        with Interrupt(stop) as interrupt:  # includes the time in which the last checkpoint is written
            async with self.closing():
                with self.console.progress("train", total) as bar:
                    await self._train(total, bar, interrupt)
        return interrupt.requested

    def _remove_later_steps(self) -> None:
        """Remove what the run has recorded of steps that it makes again, and set their checkpoints aside."""
        step = self.progress.step
        kept = step or -1  # without a checkpoint, the evaluation before training is made again too
        self.metrics.truncate(kept)
        remove_later(self.run_dir.trajectories, kept)
        if abandoned := self.checkpoints.abandon(step):
            names = ", ".join(path.name for path in abandoned)
            self.console.note(
                f"the run goes back to step {step}, and its later checkpoints are now {names} in "
                f"{self.run_dir.checkpoints}; delete them when they are no longer needed"
            )

    async def _train(self, total: int, bar: Work, interrupt: Interrupt) -> None:
        """Make the steps up to `total`, or until a signal arrives, and start to save the last one."""
        bar.advance(self.progress.step)
        await self.publisher.begin(self.progress.step)
        if not self.progress.step and self.config.evaluation.before_train:
            self._log(await self._evaluate(0))
        await self._evaluate_again()
        try:
            while self.progress.step < total and not interrupt.requested:
                with self._traced(self.progress.step + 1):
                    row = await self._step()
                await self._complete(row)
                bar.advance()
                self._check_signal(row)
                if self._save_due():
                    await self.save()
            await self.save()  # needed after a signal; else the last step is already saved
        except StoppedError:
            await self.save()
        except RunEndedError:
            await self.save()  # so that a run with other settings can resume
            raise

    async def _complete(self, row: dict[str, Any]) -> None:
        """Evaluate the policy after a step if that is due, and record the metrics of the step, also if the evaluation
        ends the run."""
        try:
            if self._evaluation_due():
                row |= await self._evaluate(self.progress.step)
        except RunEndedError:
            self._record(row)
            raise
        self._record(row)

    def _record(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step, with what the judges have spent in the run."""
        self.progress.seconds = self.timeline.seconds
        row |= judge_metrics()
        self._log(row)

    async def _evaluate_again(self) -> None:
        """Make the evaluation of the step at which the run resumes, if it was due and ended the run."""
        if not (step := self.progress.step) or not self._evaluation_due():
            return
        row = next((row for row in self.metrics.read() if row["step"] == step), None)
        if row is None or "val/success/mean" in row:
            return
        row |= await self._evaluate(step)
        self.metrics.truncate(step - 1)  # the row is written again, with the evaluation
        self._record(row)
        self.saved_step = -1  # the checkpoint is written again, with the score
        await self.save()

    def _stop(self) -> None:
        self.console.note(
            "asked to stop: the run finishes or stores its open groups, then saves and ends; a second signal ends it "
            "at once, without saving"
        )
        self.experience.stop()

    @contextmanager
    def _traced(self, number: int) -> Iterator[None]:
        """Write a trace of this step (1-based) if it is `trainer.profile_step`."""
        if number != self.config.trainer.profile_step:
            yield
            return
        path = self.run_dir.path / f"trace_step_{number}.json.gz"
        with step_trace(path, self.timeline):
            yield
        self.console.note(f"trace of step {number}: {path} (open it with ui.perfetto.dev)")

    def closing(self) -> AsyncExitStack:
        """Return a context that closes everything that runs beside the loop, for any end of the loop, and even if one
        part fails to close. It waits for a checkpoint that is being written."""
        stack = AsyncExitStack()  # closes in reverse order
        stack.push_async_exit(self._wait_saved)
        stack.callback(self.timeline.close)
        stack.callback(self.row_results.close)
        stack.callback(self.work_thread.close)
        stack.push_async_callback(self.parts.engine.close)
        stack.push_async_callback(self.parts.loop.close)
        stack.push_async_callback(self.experience.close)
        return stack

    async def _wait_saved(self, _: object, error: BaseException | None, trace: object) -> None:
        """Return when the last checkpoint is on the disk, or at once if a second signal has ended the run.

        If this rank failed, which ends the other ranks, its own error is raised and not the loss of the others.
        """
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            return
        while error is None and self.learners.is_saving:  # the event loop can handle signals meanwhile
            await asyncio.sleep(SAVED_SECONDS)
        try:
            self.learners.wait_saved()
        except JobLost:
            if error is None:
                raise

    def resume(self, checkpoint: Checkpoint) -> None:
        """Load the state of a checkpoint."""
        self.learners.load(checkpoint.path)
        torch.set_rng_state(checkpoint.rng["torch"])
        known = {"start": self.progress.start, "rows": self.progress.rows}
        self.progress = RunProgress(**checkpoint.state | known)
        self.saved_step = self.progress.step
        if self.kl.target is not None:  # a fixed coefficient is that of the command
            self.kl.coefficient = self.progress.kl_coefficient or self.kl.coefficient
        self.rows.drawn = self.progress.rows_drawn
        stored = self.progress.sampler
        self.rows.restore(stored.get("state", {}) if stored.get("name") == self.config.data.sampler else {})
        self.experience.restore(of_sources(checkpoint.groups, self.config.environments))

    def _log(self, row: dict[str, Any]) -> None:
        """Record the metrics of a step, and print the findings of the live diagnosis.

        Raises:
            SymptomError: a finding ends the run.
            RunEndedError: `on_evaluation` ends the run.
        """
        self.tracker.log(self.progress.step, row)
        self.on_row()
        for finding in self.watch.after_step({"step": self.progress.step, **row}):
            if finding.severity != Severity.NOTE:
                self.console.warning(f"{finding.severity} at step {self.progress.step}: {in_short(finding)}")
        if (end := self.watch.stop) is not None:
            raise SymptomError(
                f"diagnosis.live=stop ends the run at step {self.progress.step}: {in_short(end)} ("
                f"mtrl diagnose {self.run_dir} has the details; resume=latest diagnosis.live=warn continues the run)"
            )
        if "val/success/mean" in row:
            self.on_evaluation(self.progress.step, row)

    async def _step(self) -> dict[str, Any]:
        """Make one training step and return its metrics.

        Raises:
            RunEndedError: the step cannot be made, or its weights do not reach the engine; then the step counts and its
                metrics are recorded.
        """
        step, number = self.progress.step, self.progress.step + 1
        if self.rows.pauses is not None:
            self.rows.pauses.begin_step(step)
        waiting = "wait" if overlaps(self.config) else "generate"
        with self.timeline.span(waiting, number) as collecting:
            experience = await self.experience.collect(step)
        async with self.publisher.asleep():
            with self.timeline.span("credit", number) as crediting:
                try:
                    credited, added = await self.work_thread.do(self._credit, experience.groups)
                except RunEndedError:
                    self.experience.take_back(experience.groups)
                    raise
            with self.timeline.span("update", number) as updating:
                update, learned = await self.work_thread.do(self._learn, credited, step)
            self.progress.score = None
            self.experience.trained()
            self._note_rows()
        canary: dict[str, float] = {}
        unsent: RunEndedError | None = None
        with self.timeline.span("sync", number) as syncing:
            try:
                canary = await self.publisher.publish(number)
                self.experience.publish(number)
            except RunEndedError as error:
                unsent = error
        self.progress.step = number
        self.row_results.write(number)
        spans = {waiting: collecting, "credit": crediting, "update": updating, "sync": syncing}
        row = self._metrics(experience, credited.advantages)
        row |= self._throughput(experience, update, {name: span.seconds for name, span in spans.items()})
        row |= added | learned | canary
        self._adapt_kl(row, sum(self.experience.group_size(group.row) for group in experience.groups))
        await self.work_thread.do(self._write_trajectories, experience, credited, update)
        self.console.step({"step": self.progress.step, **row})
        self.progress.silent_steps = 0 if row.get("analysis/informative_groups") else self.progress.silent_steps + 1
        if unsent is not None:
            self._record(row)
            raise unsent
        return row

    def _credit(self, groups: list[Group]) -> tuple[Credited, dict[str, float]]:
        """Return the samples with advantages, and the metrics of the KL in the reward and of distillation.

        Raises:
            RunEndedError: the teacher does not answer; the groups are unchanged.
        """
        scored = None if self.distillation is None else self.distillation.score(groups)
        with nullcontext() if self.kl_penalty is None else self.kl_penalty.lowered(groups) as kl:
            credited = self._credit_rewards(groups)
        metrics = {} if kl is None else {"train/kl": kl}
        if self.distillation is not None and scored is not None:
            metrics |= self.distillation.apply(groups, credited, scored)
        return credited, metrics

    def _credit_rewards(self, groups: list[Group]) -> Credited:
        """Return the samples with the advantages that come from rewards."""
        algorithm = self.config.algorithm
        if self.critic is not None:
            return credit_by_critic(groups, algorithm, self.critic, self.composer)
        return credit_by_rewards(groups, algorithm, self.composer)

    def _learn(self, credited: Credited, step: int) -> tuple[UpdateResult, dict[str, float]]:
        """Train the critic, if there is one, and the policy, except in the warm-up steps of the critic. Return the
        update of the policy and the metrics of both."""
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= self.critic.update(credited.samples, credited.old_values, credited.targets, step)
            if step < self.config.algorithm.critic.warmup_steps:
                return UpdateResult(), metrics
        update = self.updater.run(credited.samples, step)
        return update, metrics | update.report.metrics()

    def _metrics(self, experience: Experience, advantages: list[Ragged]) -> dict[str, Any]:
        zeros: list[Ragged] = [[[0.0] * len(t.turns) for t in group.trajectories] for group in experience.set_aside]
        return {
            **signal_metrics([*experience.groups, *experience.set_aside], [*advantages, *zeros]),
            **experience.metrics(),
            **rollout_metrics(experience.report, self.thresholds),
            **source_metrics(experience.report, tuple(self.config.environments)),
            **role_metrics(experience.report),
            **staleness_metrics(experience.groups, self.progress.step - 1),
            "train/epoch": self.progress.rows_drawn / len(self.rows.rows),
            **self.rows.metrics(),
            "policy/version": self.parts.engine.version,
        }

    def _throughput(self, experience: Experience, update: UpdateResult, seconds: dict[str, float]) -> dict[str, float]:
        groups, stats = experience.report.groups, self.parts.engine.stats
        sampling = self.parts.loop.sampling_clock.take()
        found = self.throughput.metrics(seconds, groups, update.works, sampling)
        tokens = sum(t.action_tokens for group in groups for t in group.trajectories)
        return {
            **found,
            "time/reward": self.experience.reward_clock.take(),
            "perf/tokens_per_second": tokens / found["time/step"],
            "perf/cached_share": stats.cached_tokens / max(1, stats.prompt_tokens),
            **{f"engine/{name}": value for name, value in stats.extra.items()},
            **peak_memory(),
        }

    def _note_rollouts(self, start: float, end: float) -> None:
        """Record an interval, in seconds of `time.perf_counter`, in which episodes ran beside this step."""
        since_start = self.timeline.since_start
        self.timeline.record("rollout", self.progress.step + 1, since_start(start), since_start(end))

    def _adapt_kl(self, row: dict[str, Any], trajectories: int) -> None:
        """Adapt the weight of the KL to the KL that was measured in this step, on this number of trajectories."""
        if "train/kl" in row:
            row["train/kl_coef"] = self.kl.coefficient
            self.kl.update(row["train/kl"], trajectories)
            self.progress.kl_coefficient = self.kl.coefficient

    def _check_signal(self, row: dict[str, Any]) -> None:
        """End the run if it learns nothing.

        Raises:
            NoSignalError: there were `trainer.max_steps_without_signal` steps without an advantage in a row.
        """
        limit = self.config.trainer.max_steps_without_signal
        if self.progress.silent_steps >= limit:
            mean = row.get("rollout/reward/mean", 0.0)
            raise NoSignalError(
                f"no group had an advantage for trainer.max_steps_without_signal={limit} steps in a row (all rollouts "
                f"of a prompt have the same reward; the mean reward is {mean:.3f}): give a denser reward, harder or "
                "easier rows, or a larger algorithm.group_size"
            )

    def _evaluation_due(self) -> bool:
        every, step = self.config.evaluation.every_steps, self.progress.step
        return step == self.config.trainer.max_steps or bool(every and step % every == 0)

    def _save_due(self) -> bool:
        every, step = self.config.trainer.checkpoint.every_steps, self.progress.step
        return step == self.config.trainer.max_steps or bool(every and step % every == 0)

    async def _evaluate(self, step: int) -> dict[str, Any]:
        bar = self.console.progress(f"evaluation at step {step}", self.held_out.episodes)
        with bar as shown, self.timeline.span("evaluate", step) as evaluating:
            report = await self.held_out.run(step, lambda _: shown.advance())
        self.parts.loop.sampling_clock.take()  # the time of evaluations does not count in a step's throughput
        self.progress.score = report.metrics["val/success/mean"]
        for kind, groups in report.groups.items():
            write_groups(self.run_dir.trajectories, f"eval_{kind}", step, groups)
        self.console.evaluation({"step": step, **report.metrics}, *report.ends())
        return {**report.metrics, "time/evaluate": evaluating.seconds}

    def _write_trajectories(self, experience: Experience, credited: Credited, update: UpdateResult) -> None:
        """Write all trajectories every `trainer.save_trajectories_every` steps, and in other steps those on which
        reward and scorer disagree."""
        every, step = self.config.trainer.save_trajectories_every, self.progress.step
        kind, groups = "train", experience.report.groups
        if not every or (step != 1 and step % every):
            limit = self.config.evaluation.keep_disagreements
            kind, groups = "disagree", disagreements(groups, self.thresholds, limit)
        if groups:
            note_advantages(groups, credited.samples)
            note_logprobs(groups, update.first_logprobs)
            write_groups(self.run_dir.trajectories, kind, step, groups)

    def _note_success(self, row: Row, success: float) -> None:
        """Give the result of a group to the sampler of rows, and record it."""
        self.rows.note(row, success)
        self.row_results.note(str(row["id"]), success)

    def _note_rows(self) -> None:
        """Copy the state of the sampler of rows into the progress."""
        self.progress.rows_drawn = self.rows.drawn
        self.progress.sampler = {"name": self.config.data.sampler, "state": self.rows.state()}

    async def save(self) -> None:
        """Write a checkpoint of the current state; in the background, unless `trainer.checkpoint.background` is off."""
        if self.progress.step == self.saved_step:
            return
        self.saved_step = self.progress.step
        with self.timeline.span("save", self.progress.step):
            await self.work_thread.do(self.learners.wait_saved)
            folder = self.checkpoints.begin(self.progress.step)
            if overlaps(self.config):  # rows drawn since the last update are stored as groups, so they must count here
                self._note_rows()
                self.row_results.write(self.progress.step)  # of stored groups, which are not scored again
            state, groups, rng = vars(self.progress).copy(), self.experience.state(), {"torch": torch.get_rng_state()}
            commit = partial(self.checkpoints.commit, folder, state, groups, rng)
            await self.work_thread.do(self.learners.save, folder, commit)


def in_short(finding: Finding) -> str:
    """Return the finding's title, with the key to change first if it names one."""
    return f"{finding.title.rstrip('.')}; change {finding.change} first" if finding.change else finding.title
