"""Tables and picture of `results.csv`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from costs import LEADER
from scaling import ARMS, COMPARED, EVERYWHERE, STUDIED, WITH_WORKERS, Row

from mtrl.figures.style import BLUE, GREEN, GREY, ORANGE, PAPER, PURPLE, RED, SKY, YELLOW, panels, save, shared_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = 0.2
"""Rank 0 is saturated if a step takes longer by more than this share than a step in which rank 0 costs nothing."""
COLOURS = {"taking turns": GREY, "K = 1": BLUE, "K = 4": GREEN, WITH_WORKERS: BLUE, "K = 4, workers": GREEN}
LEADER_HEAD = (
    "workload", "GPUs", "step", "step, rank 0 free", "turns", "answers of workers", "choosing", "credit", "hand-out",
    "hand-out, network", "metrics and files", "weights: requests", "weights: host memory", "weights: broadcast",
    "interpreter busy", "interpreter of a worker busy", "memory, GiB",
)  # fmt: skip
RESOURCES = {
    "interpreter: turns": (ORANGE, lambda r: r.turns + r.choosing),
    "interpreter: all": (RED, lambda r: r.interpreter * r.step),
    "memory of its host: weights": (PURPLE, lambda r: r.host),
    "network: broadcast of weights": (YELLOW, lambda r: r.broadcast),
    "network: hand-out of batches": (SKY, lambda r: r.handout_network),
}
"""Resources of rank 0: colour in the picture, and seconds of a step in which the resource is busy."""


def of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def workloads_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.workload for row in rows))


def saturated(rows: Sequence[Row], workload: str) -> Row | None:
    """Return the run with the fewest GPUs in which rank 0 is saturated, None without one."""
    for row in of(rows, workload=workload, arm=STUDIED, free=""):
        (ideal,) = of(rows, workload=workload, arm=STUDIED, gpus=row.gpus, free=" ".join(LEADER))
        if row.step > (1 + LOSS) * ideal.step:
            return row
    return None


def markdown(head: Sequence[str], lines: Iterator[Sequence[object]]) -> str:
    every = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in every)


def tables(rows: Sequence[Row]) -> str:
    """Return Markdown with the step times by size, the arms at one size, and the seconds of rank 0 in a step."""
    sizes = sorted({row.gpus for row in rows})
    return "\n".join(
        (
            "Seconds of a step\n",
            markdown(["workload", "way", "servers", *(f"{size} GPUs" for size in sizes)], step_lines(rows, sizes)),
            f"Ways at {COMPARED} GPUs\n",
            markdown(
                ["workload", "way", "step, s", "x taking turns", "waiting, s", "update, s", "servers paused, s",
                 "sampled tokens/s per GPU", "age of groups: mean", "max", "requeued"],
                way_lines(rows),
            ),
            f"Rank 0 with {STUDIED}: seconds of a step\n",
            markdown(LEADER_HEAD, leader_lines(rows, STUDIED)),
            f"Rank 0 with {WITH_WORKERS}: seconds of a step\n",
            markdown(LEADER_HEAD, leader_lines(rows, WITH_WORKERS)),
            f"Seconds of a step at {max(sizes)} GPUs if parts of rank 0 cost nothing\n",
            markdown(["workload", "way", "no part", *LEADER, "all parts"], part_lines(rows, max(sizes))),
        )
    )  # fmt: skip


def step_lines(rows: Sequence[Row], sizes: Sequence[int]) -> Iterator[Sequence[object]]:
    for workload in workloads_of(rows):
        for arm in EVERYWHERE:
            found = {row.gpus: row for row in of(rows, workload=workload, arm=arm, free="")}
            seconds = (f"{found[size].step:.0f}" if size in found else "" for size in sizes)
            yield [workload, arm, f"{next(iter(found.values())).share:.0%}", *seconds]
        free = {row.gpus: row for row in of(rows, workload=workload, arm=STUDIED, free=" ".join(LEADER))}
        seconds = (f"{free[size].step:.0f}" if size in free else "" for size in sizes)
        yield [workload, f"{STUDIED}, rank 0 free", "", *seconds]


def way_lines(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    for workload in workloads_of(rows):
        base = of(rows, workload=workload, arm="taking turns", gpus=COMPARED, free="")
        for arm in ARMS:
            for row in of(rows, workload=workload, arm=arm, gpus=COMPARED, free=""):
                ratio = f"{base[0].step / row.step:.2f}" if base else ""
                yield [
                    workload, arm, f"{row.step:.0f}", ratio, f"{row.waiting:.0f}", f"{row.update:.0f}",
                    f"{row.paused:.0f}", f"{row.tokens_per_gpu:.0f}", f"{row.age:.2f}", row.oldest, row.requeued,
                ]  # fmt: skip


def leader_lines(rows: Sequence[Row], arm: str) -> Iterator[Sequence[object]]:
    for row in of(rows, arm=arm, free=""):
        (ideal,) = of(rows, workload=row.workload, arm=STUDIED, gpus=row.gpus, free=" ".join(LEADER))
        seconds = (row.turns, row.answers, row.choosing, row.credit, row.handout, row.handout_network, row.telling,
                   row.calls, row.host, row.broadcast)  # fmt: skip
        yield [
            row.workload, row.gpus, f"{row.step:.0f}", f"{ideal.step:.0f}", *(f"{value:.1f}" for value in seconds),
            f"{row.interpreter:.0%}", f"{row.workers_busy:.0%}", f"{row.memory_gib:.0f}",
        ]  # fmt: skip


def part_lines(rows: Sequence[Row], size: int) -> Iterator[Sequence[object]]:
    for workload in workloads_of(rows):
        (ideal,) = of(rows, workload=workload, arm=STUDIED, gpus=size, free=" ".join(LEADER))
        for arm in (STUDIED, WITH_WORKERS):
            found = {row.free: f"{row.step:.0f}" for row in of(rows, workload=workload, arm=arm, gpus=size)}
            yield [workload, arm, found[""], *(found.get(part, "") for part in LEADER), f"{ideal.step:.0f}"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the seconds of a step over GPUs (batches grow with them), and below the share in which each resource of rank
    0 is busy."""
    workloads = workloads_of(rows)
    with matplotlib.rc_context(PAPER):
        figure, axes = panels(2, len(workloads), height=2.3, width=2.9)
        for column, workload in enumerate(workloads):
            draw_steps(axes[0][column], rows, workload)
            draw_leader(axes[1][column], of(rows, workload=workload, arm=STUDIED, free=""))
        axes[0][0].set_ylabel("seconds of a step")
        axes[1][0].set_ylabel(f"busy, share of a step ({STUDIED})")
        shared_legend(figure, [panel for row in axes for panel in row])
        save(figure, path, "Modelled step time of 8 to 1,024 GPUs, and busy shares of rank 0's resources")


def draw_steps(axes: Axes, rows: Sequence[Row], workload: str) -> None:
    for arm in EVERYWHERE:
        found = of(rows, workload=workload, arm=arm, free="")
        look = {"linestyle": "-.", "marker": "s", "markersize": 3} if found[0].workers else {"marker": "."}
        axes.plot([r.gpus for r in found], [r.step for r in found], color=COLOURS[arm], label=arm, **look)
    free = of(rows, workload=workload, arm=STUDIED, free=" ".join(LEADER))
    look = {"color": COLOURS[STUDIED], "linestyle": "--", "label": f"{STUDIED}, rank 0 free"}
    axes.plot([r.gpus for r in free], [r.step for r in free], **look)
    if (row := saturated(rows, workload)) is not None:
        axes.axvline(row.gpus, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_title(workload)
    axes.set_ylim(bottom=0)
    gpu_axis(axes, [r.gpus for r in free])


def draw_leader(axes: Axes, rows: Sequence[Row]) -> None:
    for name, (colour, seconds) in RESOURCES.items():
        axes.plot([r.gpus for r in rows], [seconds(r) / r.step for r in rows], color=colour, label=name, marker=".")
    axes.set(ylim=(0, 1.02), xlabel="GPUs")
    gpu_axis(axes, [r.gpus for r in rows])


def gpu_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes], rotation=45)
