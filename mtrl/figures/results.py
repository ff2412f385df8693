"""The table of results: final held-out success of every group, for a paper (LaTeX), a README (Markdown), the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mtrl.figures.compare import RunComparison, compare_seeds
from mtrl.figures.groups import SeedGroup

SUCCESS = "val/success/mean"
HEAD = ("group", "seeds", "step", "before", "after", "difference to the first", "p")
MISSING = "–"
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", MISSING: "--", "±": r"$\pm$"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


@dataclass(frozen=True)
class GroupResult:
    """Greedy held-out success of one group."""

    group: SeedGroup
    before: list[float]
    """Success before training, for each run that was evaluated at step 0."""
    after: list[tuple[object, float]]
    """Seed and success at the last evaluation, for each evaluated run; a seed that ran twice is listed twice."""
    steps: list[int]
    """Steps of the last evaluations."""


def result(group: SeedGroup) -> GroupResult:
    found = [(run, series) for run in group if (series := run.series(SUCCESS))]
    lasts = [max(series) for _, series in found]
    return GroupResult(
        group,
        [series[0] for _, series in found if 0 in series],
        [(run.seed, series[last]) for (run, series), last in zip(found, lasts, strict=True)],
        lasts,
    )


def rows(groups: Sequence[SeedGroup]) -> list[list[str]]:
    """Return the cells below HEAD, with one row per group. Each group is compared with the first."""
    results = [result(group) for group in groups]
    return [_row(some, None if some is results[0] else _compared(results[0], some)) for some in results]


def markdown(groups: Sequence[SeedGroup]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *rows(groups)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{NOTE}\n"


def latex(groups: Sequence[SeedGroup]) -> str:
    """Return the table as a `tabular` for the booktabs package."""
    lines = [" & ".join(map(_escaped, line)) + r" \\" for line in [HEAD, *rows(groups)]]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    frame = f"\\begin{{tabular}}{{l{'r' * (len(HEAD) - 1)}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}"
    return f"% {NOTE}\n{frame}\n"


NOTE = (
    "Held-out success by the scorer, greedy, at the last evaluation: mean and standard deviation over seeds. p: "
    "Student's t test, paired by seed (marked ') where both groups have the same seeds, else Welch's; without a number "
    "where the seeds show no spread; not corrected for the number of comparisons."
)


def _compared(first: GroupResult, second: GroupResult) -> RunComparison | None:
    """Compare two groups. Runs of the same seed are averaged, because they are one draw."""
    values = [_by_seed(some.after) for some in (first, second)]
    return compare_seeds(*values) if all(values) else None


def _by_seed(values: Sequence[tuple[object, float]]) -> dict[object, float]:
    seeds = dict.fromkeys(seed for seed, _ in values)
    return {seed: fmean(value for other, value in values if other == seed) for seed in seeds}


def _row(some: GroupResult, compared: RunComparison | None) -> list[str]:
    after = list(_by_seed(some.after).values())
    cells = [some.group.label, str(len(after)), _range(some.steps), _mean(some.before), _mean(after)]
    if compared is None:
        return [*cells, MISSING, MISSING]
    p = MISSING if compared.p_value is None else _p(compared.p_value) + ("'" if compared.method == "paired" else "")
    return [*cells, f"{compared.difference:+.3f}", p]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _range(steps: Sequence[int]) -> str:
    if not steps:
        return MISSING
    return str(steps[0]) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}"


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _escaped(cell: str) -> str:
    return "".join(LATEX.get(character, character) for character in cell)
