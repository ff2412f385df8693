"""The files of an evaluation's report."""

from __future__ import annotations

from pathlib import Path

from mtrl.evaluation.report import ModelsReport
from mtrl.evaluation.report_html import to_html
from mtrl.evaluation.report_json import to_json
from mtrl.evaluation.report_markdown import to_markdown
from mtrl.utils.files import replace_text


def write_report(report: ModelsReport, folder: Path) -> list[Path]:
    """Write `report.json`, `report.md` and `report.html` into the folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.json": to_json(report), "report.md": to_markdown(report), "report.html": to_html(report)}
    for name, text in texts.items():
        # UTF-8 cannot encode half of a surrogate pair. In JSON strings, the escape represents the half.
        replace_text(folder / name, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return [folder / name for name in texts]
