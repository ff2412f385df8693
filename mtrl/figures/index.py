"""The figures by name, and index.html: all figures of a folder with their captions, and the runs that they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mtrl.figures import learning, phases, positions, results, shapes, verdicts
from mtrl.figures.axis import Study
from mtrl.figures.groups import SeedGroup, differing, identity
from mtrl.figures.style import PAPER, Drawing
from mtrl.utils.text import one_line

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
figure { margin: 2.5rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption { color: #444; font-size: 0.93em; }
table { border-collapse: collapse; font-size: 0.9em; }
th, td { text-align: left; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td:last-child { white-space: nowrap; }
"""


@dataclass(frozen=True)
class FigureEntry:
    draw: Callable[[Study], Drawing]
    over_time: bool
    """Whether the figure uses the axis of the study."""


FIGURES = {
    "learning": FigureEntry(learning.learning, True),
    "agreement": FigureEntry(verdicts.agreement, True),
    "reward_vs_score": FigureEntry(verdicts.reward_vs_score, False),
    "components": FigureEntry(learning.components, True),
    "signal": FigureEntry(learning.signal, True),
    "stops": FigureEntry(shapes.stops, True),
    "lengths": FigureEntry(shapes.lengths, True),
    "budgets": FigureEntry(learning.budgets, True),
    "turn_rewards": FigureEntry(positions.turn_rewards, False),
    "advantages": FigureEntry(positions.advantages, False),
    "actions": FigureEntry(positions.actions, False),
    "timeline": FigureEntry(phases.timeline, False),
}
"""Figures by name, in the order of their display."""

PIXELS = 130
"""Pixels of the page per inch of paper."""


def draw(name: str, study: Study) -> Drawing:
    """Draw a figure in the style `PAPER`, independent of the style of the process."""
    import matplotlib

    with matplotlib.rc_context(PAPER):
        return FIGURES[name].draw(study)


def page(drawings: Mapping[str, Drawing], groups: Sequence[SeedGroup], kind: str, tabled: bool) -> str:
    """Return the page as HTML.

    Args:
        drawings: Drawings by the names of the figures.
        kind: png, svg or pdf. The figures are stored beside the page as NAME.kind.
        tabled: Whether to show the table of results.
    """
    figures = "\n".join(_figure(name, drawing, kind) for name, drawing in drawings.items())
    title = "Figures of " + (groups[0].label if len(groups) == 1 else f"{len(groups)} groups of runs")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src 'self'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{_runs(groups)}
{_differences(groups)}
{_results(groups) if tabled else ""}
{figures}
</body>
</html>
"""


def _figure(name: str, drawing: Drawing, kind: str) -> str:
    file, width = f"{name}.{kind}", round(PIXELS * drawing.figure.get_figwidth())
    shown = file if kind == "pdf" else f'<img src="{file}" alt="{name}" width="{width}">'
    caption = f"<figcaption><b>{name}.</b> {escape(drawing.caption)}</figcaption>"
    return f'<figure id="{name}">\n<a href="{file}">{shown}</a>\n{caption}\n</figure>'


def _runs(groups: Sequence[SeedGroup]) -> str:
    rows = [
        [
            group.label,
            _text(run.seed),
            str(run.path),
            f"{run.last_step} of {_text(run.settings.get('trainer.max_steps'))}",
        ]
        for group in groups
        for run in group
    ]
    return table(["group", "seed", "run", "steps"], rows)


def _differences(groups: Sequence[SeedGroup]) -> str:
    """Return a table of all settings that differ between the groups; labels name only enough to distinguish them."""
    identities = [identity(group.runs[0].settings) for group in groups]
    keys = differing(identities)
    rows = [[key, *(_text(settings.get(key)) for settings in identities)] for key in keys]
    return "<h2>What differs</h2>\n" + table(["setting", *(group.label for group in groups)], rows) if rows else ""


def _results(groups: Sequence[SeedGroup]) -> str:
    shown = table(results.HEAD, results.rows(groups))
    links = '<a href="table.md">Markdown</a>, <a href="table.tex">LaTeX</a>'
    return f"<h2>Results</h2>\n{shown}\n<p>{escape(results.NOTE)} {links}.</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>\n" + "\n".join([line("th", head), *(line("td", row) for row in rows)]) + "\n</table>"


def _text(value: object) -> str:
    return one_line("null" if value is None else value, 80)
