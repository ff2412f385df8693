"""The number of bytes that a text such as 2GiB means."""

from __future__ import annotations

import re

UNITS = {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
"""Bytes of each unit: KiB to TiB are powers of 1024, KB to TB powers of 1000 (IEC 80000-13)."""


def byte_count(text: str) -> int:
    """Return the number of bytes of a size with a unit, such as 2GiB or 1.5 GB.

    Raises:
        ValueError: the text is not a size above 0 with a unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text)
    count = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if not count:
        raise ValueError(f"{text} is not a size; write a number above 0 and a unit ({', '.join(UNITS)}), such as 2GiB")
    return count
