"""A check of the sizes on a command line, so that a benchmark without work ends in a sentence."""

from __future__ import annotations

import argparse
from typing import Any


def check_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: float) -> None:
    """Exit with status 2 and one sentence if a whole number among the options, or in one that is a list, is below its
    least value.

    Args:
        least: least values that are not 1, by option; an option named here may also be a fraction.
    """
    for name, value in vars(args).items():
        values: list[Any] = value if isinstance(value, list) else [value]
        kinds, bound = (int, float) if name in least else int, least.get(name, 1)
        numbers = [each for each in values if isinstance(each, kinds) and not isinstance(each, bool)]
        if not all(number >= bound for number in numbers):  # NaN is refused as well
            parser.error(f"--{name.replace('_', '-')} must be at least {bound:g}")
