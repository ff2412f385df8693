"""The headline of an evaluation: success with its confidence interval first, then the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Group
from rich.rule import Rule
from rich.text import Text

from mtrl.utils.text import decimal, percent, short, whole

OF_SOURCE = re.compile(r"val/(\w+)/success/mean")
PASS_K = re.compile(r"val/success/pass_k_(\d+)")


def headline(metrics: Mapping[str, Any]) -> Group:
    """Return a rule with the step, and below it the headline numbers that `metrics` has. In a mixture, a line with the
    numbers of each source follows."""
    step = metrics.get("step")
    title = "evaluation" if step is None else f"evaluation at step {whole(step)}"
    rule = Rule(Text(title, style="bold"), align="left", style="cyan")
    sources = [found[1] for key in metrics if (found := OF_SOURCE.fullmatch(key))]
    lines = [[Text(name, style="bold"), *_numbers(_of_source(metrics, name))] for name in sources]
    return Group(Text(), rule, *(Columns(line, padding=(0, 2)) for line in [_numbers(metrics), *lines]))


def _of_source(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the metrics `val/NAME/…` of a source under the names `val/…`."""
    prefix = f"val/{name}/"
    return {f"val/{key.removeprefix(prefix)}": value for key, value in metrics.items() if key.startswith(prefix)}


def _numbers(metrics: Mapping[str, Any]) -> Iterator[Text]:
    """Yield label and number of each metric; pass@1 is left out beside the sampled success, which equals it."""
    passes = sorted((int(found[1]), key) for key in metrics if (found := PASS_K.fullmatch(key)))
    shown = [
        ("success", "val/success/mean", percent, "bold green"),
        ("sampled", "val/success/sampled", percent, "green"),
        *((f"pass@{k}", key, percent, "green") for k, key in passes if k > 1 or "val/success/sampled" not in metrics),
        ("reward", "val/reward/mean", decimal, "cyan"),
        ("turns", "val/turns/mean", short, ""),
    ]
    for label, key, show, style in shown:
        if metrics.get(key) is not None:
            interval = _interval(metrics) if key == "val/success/mean" else ""
            yield Text.assemble((f"{label} ", "dim"), (show(metrics[key]), style), (interval, "dim"))


def _interval(metrics: Mapping[str, Any]) -> str:
    low, high = metrics.get("val/success/ci_low"), metrics.get("val/success/ci_high")
    return "" if low is None or high is None else f" [{100 * low:.1f}, {100 * high:.1f}]"
