"""Live diagnosis: the same rules, checked after every step of a run."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from mtrl.config.schema import Config
from mtrl.diagnose.finding import Finding, Severity
from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.record import Record
from mtrl.diagnose.walk import walk
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import replace_text, to_strict_json

LOG = logging.getLogger("mtrl.diagnose")
FILE = "alarms.jsonl"
ENDS = frozenset({"collapse", "hacked_reward", "held_out_gap"})
"""Rules whose alarms end a run with `diagnosis.live=stop`."""


class Watch:
    """Checks the row of every step and returns new findings. It never raises, because a diagnosis must not end a run by
    accident."""

    def __init__(self, config: Config, run: RunDir):
        self.stop: Finding | None = None
        """The finding that ends the run, with `diagnosis.live=stop`."""
        self._mode = config.diagnosis.live
        self._path = run.path / FILE
        self._metrics = run.metrics
        self.record = Record(asdict(config), run.path)
        """The run so far."""
        self._proposals = Proposals(asdict(config))
        self._reported: dict[str, Severity] = {}
        self._failed = False
        self._take_up()

    def after_step(self, row: dict[str, Any]) -> list[Finding]:
        """Return the findings that are new or more severe with this row, which has a `step`; also write them into
        alarms.jsonl.

        A row of a step that was seen before means that the run was set back. Rows and findings from that step on are
        forgotten.
        """
        if self._mode == "none":
            return []
        try:
            return self._after_step(row)
        except Exception as error:
            if not self._failed:
                self._failed = True
                LOG.warning("the live diagnosis failed and the run goes on without it: %s", error, exc_info=True)
            return []

    def _after_step(self, row: dict[str, Any]) -> list[Finding]:
        if int(row["step"]) <= self.record.step and self.record.steps:
            self._set_back(int(row["step"]) - 1)
        self.record.add(row)
        found = walk(self.record).findings
        new = [self._proposals.settle(finding) for finding in found if self._is_news(finding)]
        for finding in new:
            self._reported[finding.rule] = finding.severity
            self._append(finding)
        ends = (f for f in found if f.severity == Severity.ALARM and f.rule in ENDS)
        if self._mode == "stop" and self.stop is None and (end := next(ends, None)) is not None:
            self.stop = self._proposals.settle(end)
        return new

    def _is_news(self, finding: Finding) -> bool:
        reported = self._reported.get(finding.rule)
        return reported is None or finding.severity.rank < reported.rank

    def _append(self, finding: Finding) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(to_strict_json({"step": self.record.step, **finding.to_dict()}) + "\n")

    def _take_up(self) -> None:
        """Read the existing rows of a resumed run."""
        try:
            for row in MetricsLog(self._metrics).read():
                self.record.add(row)
            self._set_back(self.record.step)
        except Exception as error:
            LOG.warning("what the diagnosis found before cannot be read: %s", error)

    def _set_back(self, step: int) -> None:
        """Forget rows and findings after `step`."""
        self.record.forget(step)
        self._reported.clear()
        earlier = [line for line in self._lines() if line["step"] <= step]
        if self._path.exists():
            replace_text(self._path, "".join(to_strict_json(line) + "\n" for line in earlier))
        for line in earlier:
            reported, severity = self._reported.get(line["rule"]), Severity(line["severity"])
            if reported is None or severity.rank < reported.rank:
                self._reported[line["rule"]] = severity

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_bytes().split(b"\n"):  # in text, more characters would end a line
            with suppress(ValueError):  # a kill may have left a half-written line, or half of a character
                found.append(json.loads(line))
        return found
