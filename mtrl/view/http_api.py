"""The HTTP API of the viewer. This is the contract between `mtrl.view` and `mtrl/view/static`.

All requests are GET. Answers are strict JSON. An unknown value is null or empty, and no key is ever missing. An error
has a status and `{"error": "one sentence"}`; unknown parameters are refused. Every string from a run is hostile text,
so the page shows it by `textContent`. Times are unix seconds. R is the id of a run, FILE is the name of a file of
trajectories without `.jsonl`, and LINE counts from 0. Each of them is percent-encoded in a path.

`/api/runs`: `{runs: [RUN], differing: [key], version, warnings: [sentence], sweeps (number)}`. RUN: `{id, name,
    experiment, path (its last parts), seed, family, status: running | finished | stopped | empty, step, max_steps,
    started, updated, differences: {key: value}, summary (summary.json), thresholds: {success, claim}, alarms (number of
    rules that found something), files, trajectories, has_timeline, has_rows, tokens: text | ids, problems:
    [sentence]}`. `family` is a label that is shared by runs that differ only in the seed. `differing` lists the keys of
    config.yaml with several values.
`/api/changes`: `{state, runs: [{id, status, step, updated, metrics, files, alarms, timeline, job, indexing}]}`. The
    answer is immediate; the page requests it about every second. Where a string differs from the last answer, the page
    requests that part again. `since=STATE` is accepted and ignored. `indexing` is `{done, total}` in bytes of the
    files; if both are equal, all lists are complete.
`/api/sweeps`: `{sweeps: [{name, objective, direction: maximize | minimize, keys (swept keys), jobs: [{number, run
    (its id), settings: {key: text}, value, steps, max_steps, seconds, status: running | finished | pruned | failed |
    interrupted | stopped, said}], the best first, seeds: [{settings, mean, deviation, count}], best: {number, command}
    or null}]}`. A sweep is the runs of one folder that are jobs (mtrl/sweep).
`/api/runs/R/config`: `{text, flat: {key: value}}`.
`/api/runs/R/metrics?keys=a&keys=b/*&since=STEP&points=2000`: `{last_step, rows, keys, columns: {key: {steps,
    values}}, thinned: [key], problems}`. `keys` is repeated, because a name may hold a comma; without it all keys are
    answered. A NaN or infinite value is null. `thinned` curves still have their extremes.
`/api/runs/R/timeline?from_step=&to_step=`: `{spans: [{step, name, lane, start, end}], total, shown, problems}`.
`/api/runs/R/alarms`: `{alarms: [in the format of mtrl/diagnose/finding.py], problems}`.
`/api/runs/R/rows`: `{sources: [{name (empty: the only task), sampler, rows (number), band: [low, high] or null, tried,
    bins, below, inside, above, over_time: [{step, tried, bins, below, inside, above}], hardest: [ROW],
    easiest: [ROW]}], problems}`. It counts the training rows of a source: `tried` have a result, `bins` are those in
    each tenth of the running success, and `below`, `inside` and `above` are relative to the band, or null. ROW: `{id,
    success (running), groups (number), step (of the last group)}`.
`/api/runs/R/files`: `{files: [{file, kind, step, size, modified, indexed, count, unreadable, problem, reward_mean,
    score_mean, success_frac, lenient, strict, failed, truncated, turns_mean, tokens_mean}], indexing}`, sorted by
    ascending step. One file holds one kind of trajectories of one step.
`/api/runs/R/trajectories?FILTERS&sort=&order=&offset=&limit=`: `{total, offset, limit, items: [SUMMARY], indexing}`.
    sort: newest | reward | score | turns | tokens | longest_turn | drift | advantage | gap (|reward - score|) |
    seconds; order: desc | asc; null is last in both orders. Ties and `newest` are sorted by step (the latest first, no
    step last; `asc` reverses only the step), kind, file and line.
    SUMMARY: `{file, line, kind, step, task, group, index, reward, score, verdict: agree | lenient | strict | null,
    success, claimed, stop, turns, tokens (sampled), longest_turn, cut_turns, context, versions: [oldest, newest],
    advantage (mean), informative (whether an advantage is not 0), both null without advantages, drift, components:
    {name: sum}, rewards (of the first 64 turns), trainable, failed, truncated, seconds, error (its last line), problem
    (why the line cannot be read)}`.
    FILTERS, joined by AND: file=, task= (both may be repeated), group=, kind=a,b, stop=a,b, step=3 or 3-9, contains=
    (part of the task's id), verdict=agree | lenient | strict | disagree, success= failed= truncated= trainable=
    readable= 1 or 0, reward_min= reward_max= turns_min= turns_max=. A trajectory without a score has no verdict and no
    success. failed: it stopped by env_error, timeout, parse_error or aborted, has an error, or cannot be read.
    truncated: it stopped by turn_token_limit or context_limit, or a turn was cut.
`/api/runs/R/groups?FILTERS&sort=&order=&offset=&limit=`: `{total, offset, limit, items: [GROUP], indexing}`. sort:
    newest | reward_mean | reward_std | successes | disagreements | size. GROUP, within one file: `{file, kind, step,
    group, task, size, reward_mean, reward_std (population), reward_min, reward_max, scored, successes, lenient, strict,
    failed, tokens_mean, turns_mean, informative (null: no advantages), members: [SUMMARY]}`. It counts only members
    that match the filters.
`/api/runs/R/facets?FILTERS`: `{total, kinds, steps, stops, verdicts: [{value, count}], tasks: [{value, count,
    reward_mean, successes, scored}], tasks_total, components: [name], indexing}`.
`/api/runs/R/search?q=&FILTERS&sort=&order=&cursor=&limit=`: `{items: [{summary, hits: [{turn (0: the last
    observation), role, before, match, after}], hit_count}], searched, missed, total, cursor, indexing}`. The search is
    for plain text, ignores case and covers all messages. A request ends after half a second or `limit` items, and a
    request with its `cursor` continues from there; a null cursor is the end. `missed` counts rows that were added
    meanwhile at positions already passed; only a new search finds them.
`/api/runs/R/trajectory/FILE/LINE`: `{summary, tokens: text | ids, metrics, error, final_observation: [MESSAGE], turns:
    [TURN], previous, next: {file, line} of its group, group: [SUMMARY], problem, raw (of a line that cannot be read)}`.
    MESSAGE: `{role, content, tool_calls: [{name, arguments}], name, reasoning}`, all text; with images also `images:
    [data URL]`.
    TURN: `{number, observation: {messages, tokens: TOKENS, whole_context}, action: {text, message, tokens: TOKENS},
    reward, components, metrics, advantage (mean), finish, cut, break, summary (whether the policy summarised the
    conversation), parent (number of the turn that it extends, null: the one before), trained, untrained (reason),
    versions: [[version, tokens]], seconds_generate, seconds_environment}`.
    TOKENS, columns of equal length: `{ids, texts, special: [index], continued: [index] (tokens whose character begins
    in an earlier token), by: [[count, template | policy | context | a role]], logprobs, trainer_logprobs, drift
    (trainer - sampler), advantages}`; unknown columns are null.

An exported file holds `{version: 1, created, left_out, runs_left_out, routes: {path: answer}}` in the script element
`mtrl-export`. It has the answers to paths without a query; `trajectories` has all exported ones. The page then computes
groups, facets and search results itself.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mtrl
from mtrl.record.config import LARGEST
from mtrl.record.index import IndexRow, StoredFile
from mtrl.record.library import Library
from mtrl.record.reading import read
from mtrl.record.run import Run, modified
from mtrl.sweep.sweep_runs import Sweep, SweepRun, ranked, read_job, to_plain
from mtrl.view import differences
from mtrl.view.detail import LONGEST_RAW, UnreadableLine, message, parse, turns_of
from mtrl.view.query import Query, QueryRefusal
from mtrl.view.row_statistics import row_statistics
from mtrl.view.search import Needle, search
from mtrl.view.select import FILTERS, ORDERS, in_order, matching
from mtrl.view.series import MOST_POINTS, curves
from mtrl.view.summaries import GROUP_SORTS, facets, file_summary, group_summary, grouped, sort_groups, summary

LARGEST_YAML = 256 * 1024
"""Maximum number of characters of config.yaml that are shown."""
MOST_SPANS = 4000
MOST_ALARMS = 1000
MOST_ITEMS = 500
MOST_LISTS = 16
"""Maximum number of filtered and sorted lists in the cache, for requests for further pages."""

Json = dict[str, Any]


class Api:
    """The answers of the API as Python objects; `mtrl.view.server` sends them and `mtrl.view.export` stores them."""

    def __init__(self, library: Library):
        self.library = library
        self._lists: dict[Any, Sequence[IndexRow]] = {}
        self._lock = threading.Lock()
        self._files: dict[StoredFile, tuple[Any, Json]] = {}

    def run(self, run_id: str) -> Run:
        """Return a run by its id.

        Raises:
            Refusal: The run does not exist.
        """
        run = self.library.run(run_id)
        if run is None:
            raise QueryRefusal(404, "there is no such run here")
        return run

    def runs(self, query: Query) -> Json:
        query.check(())
        runs = self.library.runs
        keys = differences.differing([run.flat_config for run in runs])
        labels = differences.families([(run.name, run.flat_config) for run in runs], keys)
        shown = [self._run(run, keys, label) for run, label in zip(runs, labels, strict=True)]
        others = {"version": mtrl.__version__, "warnings": self.library.warnings, "sweeps": len(sweeps_of(runs))}
        return {"runs": shown, "differing": keys, **others}

    def sweeps(self, query: Query) -> Json:
        query.check(())
        runs = self.library.runs
        ids = {run.path: run.id for run in runs}
        return {"sweeps": [to_plain(sweep, ids) for sweep in sweeps_of(runs)]}

    def _run(self, run: Run, keys: Sequence[str], family: str) -> Json:
        run.index.refresh()
        files = run.index.files
        return {
            "id": run.id,
            "name": run.name,
            "experiment": run.flat_config.get("name"),
            "path": run.place,
            "seed": run.flat_config.get("seed"),
            "family": family,
            "status": run.status,
            "step": run.step,
            "max_steps": run.max_steps,
            "started": modified(run.dir.config),
            "updated": run.updated,
            "differences": differences.of_run(run.flat_config, keys),
            "summary": run.summary or None,
            "thresholds": {"success": run.thresholds.success, "claim": run.thresholds.claim},
            "alarms": len({finding.get("rule") for finding in run.alarms.refresh()}),
            "files": len(files),
            "trajectories": sum(len(file.lines) for file in files),
            "has_timeline": run.dir.timeline.is_file(),
            "has_rows": run.dir.rows.is_file(),
            "tokens": tokens_as(run),
            "problems": run.problems(),
        }

    def changes(self, query: Query) -> Json:
        """Return the states of all runs, which the page compares with the last ones."""
        query.check(("since",))
        runs = [self._state(run) for run in self.library.runs]
        return {"state": _digest([{k: v for k, v in run.items() if k != "updated"} for run in runs]), "runs": runs}

    def _state(self, run: Run) -> Json:
        run.index.refresh()
        for file in (run.metrics, run.alarms, run.timeline):
            file.refresh()
        return {
            "id": run.id,
            "status": run.status,
            "step": run.step,
            "updated": run.updated,
            "metrics": run.metrics.state,
            "files": _digest([(f.name, f.size, f.modified, f.indexed) for f in run.index.files]),
            "alarms": run.alarms.state,
            "timeline": run.timeline.state,
            "job": str(modified(run.dir.job)),
            "indexing": indexing(run),
        }

    def config(self, run: Run, query: Query) -> Json:
        query.check(())
        try:
            text = read(run.dir.config, run.path, LARGEST).decode("utf-8", "replace")[:LARGEST_YAML]
        except OSError:  # `problems` of the run has the reason
            text = ""
        return {"text": text, "flat": run.flat_config}

    def metrics(self, run: Run, query: Query) -> Json:
        query.check(("keys", "since", "points"))
        points = query.integer("points", MOST_POINTS, 2, MOST_POINTS)
        found = curves(run.metrics.refresh(), query.all("keys"), query.optional("since"), points)
        return {**found, "problems": run.metrics.problems}

    def timeline(self, run: Run, query: Query) -> Json:
        query.check(("from_step", "to_step"))
        first, last = query.optional("from_step"), query.optional("to_step")
        spans = [
            {name: span.get(name) for name in ("step", "name", "lane", "start", "end")}
            for span in run.timeline.refresh()
            if (first is None or span["step"] >= first) and (last is None or span["step"] <= last)
        ]
        shown = spans[-MOST_SPANS:]
        return {"spans": shown, "total": len(spans), "shown": len(shown), "problems": run.timeline.problems}

    def rows(self, run: Run, query: Query) -> Json:
        query.check(())
        return {"sources": row_statistics(run.row_results.refresh()), "problems": run.row_results.problems}

    def alarms(self, run: Run, query: Query) -> Json:
        query.check(())
        return {"alarms": run.alarms.refresh()[-MOST_ALARMS:], "problems": run.alarms.problems}

    def files(self, run: Run, query: Query) -> Json:
        query.check(())
        run.index.rows()
        files = sorted(run.index.files, key=lambda f: (f.step is None, f.step or 0, f.kind, f.name))
        return {"files": [self._file(file, run) for file in files], "indexing": indexing(run)}

    def _file(self, file: StoredFile, run: Run) -> Json:
        state = (file.version, file.size, file.indexed, run.thresholds)
        if file not in self._files or self._files[file][0] != state:
            self._files[file] = (state, file_summary(file, run.thresholds))
        return self._files[file][1]

    def trajectories(self, run: Run, query: Query) -> Json:
        query.check((*FILTERS, "sort", "order", "offset", "limit"))
        rows, thresholds = self._list(run, query), run.thresholds
        items = [summary(row, thresholds) for row in page(rows, query, 100)]
        return {**pages(rows, query, 100), "items": items, "indexing": indexing(run)}

    def groups(self, run: Run, query: Query) -> Json:
        query.check((*FILTERS, "sort", "order", "offset", "limit"))
        name, is_ascending = query.choice("sort", GROUP_SORTS), query.choice("order", ORDERS) == "asc"
        thresholds = run.thresholds
        found = grouped(matching(run.index.rows(), query, thresholds))
        groups = sort_groups(found, name, is_ascending, thresholds)
        items = [group_summary(rows, thresholds) for rows in page(groups, query, 50)]
        return {**pages(groups, query, 50), "items": items, "indexing": indexing(run)}

    def facets(self, run: Run, query: Query) -> Json:
        query.check(FILTERS)
        rows = matching(run.index.rows(), query, run.thresholds)
        return {**facets(rows, run.thresholds), "indexing": indexing(run)}

    def search(self, run: Run, query: Query) -> Json:
        query.check((*FILTERS, "q", "sort", "order", "cursor", "limit"))
        rows = self._list(run, query)
        most = query.integer("limit", 50, 1, MOST_ITEMS)
        found = search(rows, Needle(query.text("q")), query.text("cursor") or None, most)
        items = [
            {"summary": summary(row, run.thresholds), "hits": hits, "hit_count": number}
            for row, hits, number in found.rows
        ]
        counts = {"searched": found.searched, "missed": found.missed, "total": len(rows)}
        return {"items": items, **counts, "cursor": found.cursor, "indexing": indexing(run)}

    def _list(self, run: Run, query: Query) -> Sequence[IndexRow]:
        """Return the filtered and sorted rows. The last lists are cached, because the page requests them page by
        page."""
        rows = run.index.rows()
        parameters = tuple((name, tuple(query.all(name))) for name in (*FILTERS, "sort", "order"))
        key = (run.id, run.index.version, run.thresholds, parameters)
        found = self._lists.get(key)
        if found is None:
            found = in_order(matching(rows, query, run.thresholds), query)
            with self._lock:
                while len(self._lists) >= MOST_LISTS:
                    del self._lists[next(iter(self._lists))]
                self._lists[key] = found
        return found

    def trajectory(self, run: Run, name: str, number: str, query: Query) -> Json:
        query.check(())
        run.index.rows()
        file = run.index.file(name)
        lines = (
            file.lines if file is not None else []
        )  # a reference to this list, because indexing the file again replaces it
        if file is None or not number.isdecimal() or len(number) > 12 or int(number) >= len(lines):
            raise QueryRefusal(404, "there is no such trajectory in this run")
        row = IndexRow(file, int(number), lines[int(number)])
        answer: Json = {
            "summary": summary(row, run.thresholds),
            "tokens": "ids" if run.tokenizer is None else "text",
            **{"metrics": {}, "error": None, "final_observation": [], "turns": [], "group": []},
            **dict.fromkeys(("previous", "next", "problem", "raw")),
        }
        line = b""
        try:
            line = file.read_line(row.line)
            trajectory = parse(line)
            answer["turns"] = turns_of(trajectory, file.kind, run.tokenizer)
            answer["final_observation"] = [message(each) for each in trajectory.final_observation]
            answer["metrics"], answer["error"] = trajectory.metrics, trajectory.error
        except (UnreadableLine, OSError) as error:
            answer["problem"] = f"the line cannot be read: {error}"
            answer["raw"] = line[: 4 * LONGEST_RAW].decode("utf-8", "replace")[:LONGEST_RAW]
        if row.line.problem is None:
            answer |= self._neighbours(row, run)
        return answer

    def _neighbours(self, row: IndexRow, run: Run) -> Json:
        """Return the members of the trajectory's group, and the previous and the next one."""
        lines = enumerate(list(row.file.lines))
        mates = [IndexRow(row.file, n, line) for n, line in lines if line.group_id == row.line.group_id]
        mates = sorted((r for r in mates if r.line.problem is None), key=lambda r: (r.line.place, r.number))
        numbers = [mate.number for mate in mates]
        place = numbers.index(row.number) if row.number in numbers else 0
        return {
            "group": [summary(mate, run.thresholds) for mate in mates],
            "previous": {"file": row.file.name, "line": numbers[place - 1]} if place else None,
            "next": {"file": row.file.name, "line": numbers[place + 1]} if place + 1 < len(numbers) else None,
        }


OF_A_RUN: dict[str, Callable[[Api, Run, Query], Json]] = {
    "config": Api.config,
    "metrics": Api.metrics,
    "timeline": Api.timeline,
    "rows": Api.rows,
    "alarms": Api.alarms,
    "files": Api.files,
    "trajectories": Api.trajectories,
    "groups": Api.groups,
    "facets": Api.facets,
    "search": Api.search,
}
"""Method of `Api` for the last part of `/api/runs/R/…`."""


def sweeps_of(runs: Sequence[Run]) -> list[Sweep]:
    """Return the sweeps in the order of the runs. A sweep is the runs of one folder that are jobs."""
    found: dict[Path, list[SweepRun]] = {}
    for run in runs:
        if (job := read_job(run.path, run)) is not None:
            found.setdefault(run.path.parent, []).append(job)
    return [Sweep(folder, ranked(jobs)) for folder, jobs in found.items()]


def indexing(run: Run) -> Json:
    done, total = run.index.progress
    return {"done": done, "total": total}


def tokens_as(run: Run) -> str:
    return "text" if run.has_tokenizer else "ids"


def page(items: Sequence[Any], query: Query, size: int) -> Sequence[Any]:
    """Return the part of a list that a request selects."""
    found = pages(items, query, size)
    return items[found["offset"] : found["offset"] + found["limit"]]


def pages(items: Sequence[Any], query: Query, size: int) -> Json:
    offset = query.integer("offset", 0, 0, 10**9)
    return {"total": len(items), "offset": offset, "limit": query.integer("limit", size, 1, MOST_ITEMS)}


def _digest(value: Any) -> str:
    """Return a short text that changes when the value changes."""
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]
