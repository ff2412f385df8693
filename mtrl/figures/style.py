"""How every picture of mtrl looks, and how it is written: the same input gives the same bytes."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.tracking.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREEN, ORANGE, PURPLE, RED, GREY = "#0072B2", "#009E73", "#D55E00", "#AA4499", "#CC3311", "#777777"
"""Colours that also differ for the colour-blind (Okabe and Ito, Tol)."""
YELLOW, SKY, INDIGO, PALE = "#E69F00", "#56B4E9", "#332288", "#DDDDDD"

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, INDIGO, GREY)
"""In this order where things are only to be told apart."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Beyond as many lines as there are colours, the dash differs as well."""

STOPS = {
    "done": GREEN,
    "max_turns": ORANGE,
    "turn_token_limit": YELLOW,
    "context_limit": PURPLE,
    "parse_error": RED,
    "env_error": INDIGO,
    "timeout": SKY,
    "aborted": GREY,
}
"""Reason for which an episode ended -> colour, in the order in which they are stacked."""

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # names come from configurations and environments, and may hold a $
}
"""Of every picture. Those of `mtrl.figures` are smaller, see PAPER."""

PAPER: Any = {
    **STYLE,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "lines.linewidth": 1.5,
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "svg.hashsalt": "mtrl",
}

COLUMN = 3.4
"""Inches: one column of a two-column page."""
LETTERS = 18
"""Letters of a legend to the inch, roughly."""


def panels(rows: int, columns: int, height: float = 2.2, width: float = COLUMN) -> tuple[Figure, list[list[Axes]]]:
    """A figure of rows x columns panels, each `width` x `height` inches.

    No pyplot: a figure of our own needs no display and leaves no global state.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05)
    figure = Figure(figsize=(width * columns, height * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def save(figure: Figure, path: Path, caption: str) -> None:
    """Write the figure whole or not at all, in the format that `path` is named by, with its caption as metadata."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    metadata: dict[str, Any] = {
        "png": {"Software": None, "Description": caption},
        "svg": {"Date": None, "Description": caption},
        "pdf": {"CreationDate": None, "Subject": caption},
    }[kind]
    with matplotlib.rc_context(PAPER):
        replace_file(path, lambda part: figure.savefig(part, format=kind, dpi=220, metadata=metadata))


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element of a page, without a background; its text stays text, in the page's font.

    Args:
        name: another one for every figure of a page, so that their ids differ.
    """
    import matplotlib

    file = StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Type", "Format"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def colour_of(number: int) -> dict[str, Any]:
    """Colour and dash of the number-th line."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def title(axes: Axes, text: str, width: int = 40) -> None:
    """The panel's title, broken where it is longer than a column."""
    axes.set_title("\n".join(textwrap.wrap(text, width)) or " ")


def row_title(axes: Axes, text: str) -> None:
    """The title of a row of panels, above its first one; it may run over the others, which have none."""
    axes.set_title(" ")
    above: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "weight": "bold"}
    axes.annotate(text, (0, 1), (0, 5), fontsize=PAPER["axes.titlesize"], **above).set_in_layout(False)


def not_measured(axes: Axes, why: str = "not measured") -> None:
    """An empty panel that says so."""
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
    axes.grid(False)


def shared_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below the panels, in as many columns as fit; the same name means the same thing in each of them.

    The figure grows by what the legend needs.
    """
    found = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if found:
        width, height = figure.get_size_inches()
        columns = min(len(found), max(1, int(width * LETTERS / (max(map(len, found)) + 6))))
        figure.set_size_inches(width, height + 0.16 * -(-len(found) // columns))
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def unit_scale(axes: Axes) -> None:
    """From 0 to 1, and further where the values go further."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.02) if low < -0.06 else -0.02, max(high, 1.02) if high > 1.06 else 1.02)


def whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))


def moving_average(values: list[float], half: int | None = None) -> list[float]:
    """Centred mean over 2 half + 1 values, fewer at the ends; by default about a tenth of them, 21 at most.

    Values stay as they are where they are few.
    """
    half = half_window(len(values)) if half is None else half
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows] if half else values


def half_window(count: int) -> int:
    return min(count // 20, 10)


def stack_shares(
    axes: Axes, x: Sequence[float], parts: Mapping[str, Sequence[float]], colours: Mapping[str, Any], **look: Any
) -> None:
    """Shares that sum to 1, stacked over x; one that is always zero is left out, and a single x is drawn as a bar.

    `look` is that of the areas.
    """
    shown = {name: list(values) for name, values in parts.items() if any(values)}
    x = list(x)
    if len(x) == 1:
        x, shown = [x[0] - 0.5, x[0] + 0.5], {name: values * 2 for name, values in shown.items()}
    chosen = [colours.get(name) or COLOURS[number % len(COLOURS)] for number, name in enumerate(shown)]
    edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
    axes.stackplot(x, *shown.values(), labels=list(shown), colors=chosen, **edges, **look)
    axes.set(ylim=(0, 1), xlim=(x[0], x[-1]))
    axes.grid(False)
