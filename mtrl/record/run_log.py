"""run.log: the lines of the console without colours, and every log record of mtrl."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class RunLog:
    """Writes log records of the `mtrl` loggers and mirrored console lines to a file, until closed::

    with RunLog(run.log) as log:
        console = Console(mirror=log.line)
        log.show_warnings(console.show_warning)
    """

    def __init__(self, path: Path):
        self._logger = logging.getLogger("mtrl")
        self._level = self._logger.level
        self._logger.setLevel(min(self._logger.getEffectiveLevel(), logging.INFO))
        self._file = _File(path, encoding="utf-8", errors="backslashreplace")
        self._file.setFormatter(logging.Formatter("{asctime} {levelname:<7} {message}", "%Y-%m-%d %H:%M:%S", style="{"))
        self._handlers: list[logging.Handler] = []
        self._attach(self._file)

    def line(self, text: str, level: int = logging.INFO) -> None:
        """Write one line of the console to the file only. A logger would print it in the terminal again."""
        record = {"name": "mtrl.console", "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
        self._file.handle(logging.makeLogRecord(record))

    def show_warnings(self, show: Callable[[str], Any]) -> None:
        """Also pass warnings and errors of the `mtrl` loggers to `show`, which must not mirror them to this log."""
        self._attach(_Callback(show))

    def close(self) -> None:
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        self._logger.setLevel(self._level)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self, handler: logging.Handler) -> None:
        self._handlers.append(handler)
        self._logger.addHandler(handler)


class _File(logging.FileHandler):
    """File handler that drops a line that cannot be written. Not a log line but the first row or checkpoint that cannot
    be written ends the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Callback(logging.Handler):
    """Calls a function with the first line of each warning; run.log has the tracebacks."""

    def __init__(self, show: Callable[[str], Any]):
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(record.getMessage().partition("\n")[0])
        except Exception:
            self.handleError(record)
