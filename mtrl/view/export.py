"""Export of a page that needs no server: one HTML file with its styles, its scripts and its data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mtrl.config.outputs import check_file
from mtrl.errors import UserError
from mtrl.record.index import IndexRow
from mtrl.record.run import Run
from mtrl.scoring.agreement import TrajectoryAgreement
from mtrl.utils.files import replace_text
from mtrl.view.http_api import Api, indexing
from mtrl.view.query import Query
from mtrl.view.select import failed, truncated, verdict
from mtrl.view.server import STATIC, to_json
from mtrl.view.summaries import grouped, summary

ELEMENT = "mtrl-export"
LARGEST = 64 * 2**20
"""Maximum size of the trajectories in a file, in bytes, because a browser reads all of them at once."""
OF_A_RUN = ("config", "metrics", "timeline", "rows", "alarms", "files")

_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w.-]+\.css)">')
_SCRIPT = re.compile(r'<script type="module" src="/static/([\w.-]+\.js)"></script>')
_IMPORT = re.compile(r"""(\bfrom\s*|^\s*import\s*)(["'])\./([\w.-]+\.js)\2""", re.MULTILINE)


@dataclass
class Bundle:
    """Data of the exported file."""

    routes: dict[str, Any] = field(default_factory=dict)
    """Answer of the server by path."""
    exported: int = 0
    left_out: int = 0


def export(api: Api, path: Path, most: int) -> str:
    """Write the runs of `api` to `path`, with at most `most` trajectories. Return a sentence about the file.

    Raises:
        UserError: The file cannot be written.
    """
    check_file(f"--export {path}", path)
    bundle = collect(api, most)
    content = {
        "version": 1,
        "created": time.time(),
        "left_out": bundle.left_out,
        "runs_left_out": api.library.left_out,
        "routes": bundle.routes,
    }
    html = page(content)
    try:
        replace_text(path, html)
    except OSError as error:
        raise UserError(f"--export {path} cannot be written ({error.strerror}); name another file") from error
    left_out = f" ({bundle.left_out:,} were left out)" if bundle.left_out else ""
    size = path.stat().st_size / 2**20
    runs = len(api.library.runs)
    return f"{path}: {runs} run{'s' if runs != 1 else ''}, {bundle.exported:,} trajectories{left_out}, {size:.1f} MiB"


def collect(api: Api, most: int) -> Bundle:
    """Return the answers of all routes. Each run has an equal share of the trajectories: those of `worth_reading`."""
    bundle = Bundle({"/api/runs": api.runs(Query())})
    runs = api.library.runs
    size = 0
    for number, run in enumerate(runs):
        wait_for_indexes(run)
        rows = run.index.rows()
        share = (most - bundle.exported) // (len(runs) - number)
        chosen: list[IndexRow] = []
        for row in worth_reading(rows, run, share):
            place = f"{_base(run)}/trajectory/{quote(row.file.name, safe='')}/{row.number}"
            answer = api.trajectory(run, row.file.name, str(row.number), Query())
            size += len(to_json(answer))
            if size > LARGEST and bundle.exported + len(chosen):
                break
            bundle.routes[place] = answer
            chosen.append(row)
        newest_first = {id(row.line): place for place, row in enumerate(rows)}
        chosen.sort(key=lambda row: newest_first[id(row.line)])
        bundle.exported += len(chosen)
        bundle.left_out += len(rows) - len(chosen)
        bundle.routes |= {f"{_base(run)}/{what}": _ask(api, run, what) for what in OF_A_RUN}
        items = [summary(row, run.thresholds) for row in chosen]
        bundle.routes[f"{_base(run)}/trajectories"] = {
            **{"total": len(items), "offset": 0, "limit": len(items), "items": items},
            "indexing": indexing(run),
        }
    bundle.routes["/api/sweeps"] = api.sweeps(Query())
    bundle.routes["/api/runs"] = api.runs(Query())  # again, after all files have been indexed
    return bundle


def wait_for_indexes(run: Run) -> None:
    """Wait until every line of the run is indexed; for a live run, every line that existed at the call."""
    _, size = (run.index.rows(), run.index.progress[1])
    while run.index.progress[0] < size and not all(file.indexed for file in run.index.files):
        time.sleep(0.05)


def worth_reading(rows: Sequence[IndexRow], run: Run, most: int) -> list[IndexRow]:
    """Choose at most `most` rows: up to a quarter with a disagreement of reward and scorer, up to an eighth that failed
    and an eighth that were cut. The rest are whole groups, one from each file in turn, the newest files first."""
    disagree = [
        r for r in rows if verdict(r.line, run.thresholds) in (TrajectoryAgreement.LENIENT, TrajectoryAgreement.STRICT)
    ]
    odd = [
        *disagree[: most // 4],
        *[row for row in rows if failed(row.line)][: most // 8],
        *[row for row in rows if truncated(row.line)][: most // 8],
    ]
    by_file: dict[str, list[list[IndexRow]]] = {}
    for group in grouped(rows):
        by_file.setdefault(group[0].file.name, []).append(group)
    in_turn = chain.from_iterable(zip_longest(*by_file.values()))
    chosen = {(row.file.name, row.number): row for row in odd}
    for row in chain.from_iterable(group for group in in_turn if group):
        if len(chosen) >= most:
            break
        chosen[row.file.name, row.number] = row
    return list(chosen.values())[:most]


def page(content: dict[str, Any]) -> str:
    """Return the page with styles, scripts and data inside. Its content security policy forbids all other scripts and
    all loading."""
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    entry = _SCRIPT.search(html)
    if entry is None:
        raise ValueError("index.html has no module script")
    names = list(modules(entry[1]))
    addresses = {f"mtrl/{name}": data_url(module(name)) for name in names}
    import_map = json.dumps({"imports": addresses})
    start = f'import "mtrl/{entry[1]}";'
    html = _SCRIPT.sub("", html)
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in _STYLE.findall(html)]
    style = "\n".join(styles)
    if "</style" in style.lower():
        raise ValueError("a style sheet would end its element")
    html = _STYLE.sub("", html)
    policy = (
        f"default-src 'none'; script-src {csp_hash(import_map)} {csp_hash(start)} data:; style-src {csp_hash(style)}; "
        "img-src data:; font-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="importmap">{import_map}</script>\n'
    )
    body = (
        f'<script type="application/json" id="{ELEMENT}">{embedded(content)}</script>\n'
        f'<script type="module">{start}</script>\n'
    )
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)
    before, end, after = html.rpartition("</body>")
    return before + body + end + after


def embedded(value: Any) -> str:
    """Return JSON for use inside a script element: no text in it can end the element or a line."""
    text = to_json(value).decode()
    for char in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def modules(name: str) -> Iterator[str]:
    """Yield the names of a script and of all its imports, each once."""
    todo, seen = [name], {name}
    while todo:
        current = todo.pop(0)
        yield current
        for found in _IMPORT.findall((STATIC / current).read_text(encoding="utf-8")):
            if found[2] not in seen:
                seen.add(found[2])
                todo.append(found[2])


def module(name: str) -> str:
    """Return a script that imports by the names of the import map, because a `data:` module has no folder for relative
    imports."""
    return _IMPORT.sub(r"\1\2mtrl/\3\2", (STATIC / name).read_text(encoding="utf-8"))


def data_url(script: str) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(script.encode()).decode()}"


def csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _base(run: Run) -> str:
    return f"/api/runs/{quote(run.id, safe='')}"


def _ask(api: Api, run: Run, what: str) -> Any:
    return getattr(api, what)(run, Query())
