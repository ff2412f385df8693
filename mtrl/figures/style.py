"""Style of all figures of mtrl, and their output, which is deterministic: the same input gives the same bytes."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl.utils.files import replace_file
from mtrl.utils.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREEN, ORANGE, PURPLE, RED, GREY = "#0072B2", "#009E73", "#D55E00", "#AA4499", "#CC3311", "#777777"
"""Colours that people with colour blindness can distinguish (Okabe and Ito, Tol)."""
YELLOW, SKY, INDIGO, PALE = "#E69F00", "#56B4E9", "#332288", "#DDDDDD"

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, INDIGO, GREY)
"""Colours of lines without a fixed colour, in this order."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Dashes of lines; the dash changes after every `len(COLOURS)` lines."""

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
"""Colour of each stop reason, in the order in which they are stacked."""

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
"""Style of every figure. Figures of `mtrl.figures` use PAPER, which is smaller."""

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
"""Width of one column of a two-column page, in inches."""
LETTERS = 18
"""Approximate number of letters per inch of a legend."""


@dataclass(frozen=True)
class Drawing:
    """A figure and its caption."""

    figure: Figure
    caption: str


def panels(rows: int, columns: int, height: float = 2.2, width: float = COLUMN) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of rows x columns panels, each `width` x `height` inches.

    It does not use pyplot, so it needs no display and leaves no global state.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05)
    figure = Figure(figsize=(width * columns, height * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False).tolist()


def save(figure: Figure, path: Path, caption: str) -> None:
    """Write the figure whole or not at all, in the format of the suffix of `path`, with its caption as metadata."""
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
    """Return the figure as an `<svg>` element of a page, without a background. Its text stays text in the page's font.

    Args:
        name: Name that is unique among the figures of a page, so that their ids differ.
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
    """Return colour and dash of the `number`-th line, counted from 0."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def label_of(name: str) -> str:
    """Return a name from an environment or a configuration as the label of a legend or a tick. Matplotlib leaves labels
    that begin with `_` out of legends."""
    label = one_line(name)
    return f" {label}" if label.startswith("_") else label


def title(axes: Axes, text: str, width: int = 40) -> None:
    """Set the title of a panel, wrapped if it is longer than a column."""
    axes.set_title("\n".join(textwrap.wrap(text, width)) or " ")


def row_title(axes: Axes, text: str) -> None:
    """Set the title of a row of panels above its first panel. It may extend over the other panels, which have no
    title."""
    axes.set_title(" ")
    above: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "weight": "bold"}
    axes.annotate(text, (0, 1), (0, 5), fontsize=PAPER["axes.titlesize"], **above).set_in_layout(False)


def not_measured(axes: Axes) -> None:
    """Show the note "not measured" in an empty panel."""
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
    axes.grid(False)


def shared_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below the panels, in as many columns as fit. A label must have the same meaning in all panels.

    The figure grows by the height of the legend.
    """
    found = {label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if found:
        width, height = figure.get_size_inches()
        columns = min(len(found), max(1, int(width * LETTERS / (max(map(len, found)) + 6))))
        figure.set_size_inches(width, height + 0.16 * -(-len(found) // columns))
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)


def unit_scale(axes: Axes) -> None:
    """Set the vertical limits to 0 and 1, or wider if the values exceed them."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.02) if low < -0.06 else -0.02, max(high, 1.02) if high > 1.06 else 1.02)


def whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))


def moving_average(values: list[float]) -> list[float]:
    """Return the centred means over about a tenth of the values, at most 21 and fewer at the ends. Fewer than 20 values
    are returned unchanged."""
    half = half_window(len(values))
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows] if half else values


def half_window(count: int) -> int:
    return min(count // 20, 10)


def stack_shares(
    axes: Axes, x: Sequence[float], parts: Mapping[str, Sequence[float]], colours: Mapping[str, Any], **look: Any
) -> None:
    """Stack shares that sum to 1 over x. A share that is always 0 is left out, and a single x is drawn as a bar.

    `look` has further options of the areas.
    """
    shown = {name: list(values) for name, values in parts.items() if any(values)}
    x = list(x)
    if len(x) == 1:
        x, shown = [x[0] - 0.5, x[0] + 0.5], {name: values * 2 for name, values in shown.items()}
    chosen = [colours.get(name) or COLOURS[number % len(COLOURS)] for number, name in enumerate(shown)]
    edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
    axes.stackplot(x, *shown.values(), labels=list(map(label_of, shown)), colors=chosen, **edges, **look)
    axes.set(ylim=(0, 1), xlim=(x[0], x[-1]))
    axes.grid(False)
