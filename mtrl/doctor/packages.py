"""What is installed, compared with what setup.py asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BASE = ""
"""The extra of what is always needed."""
HIDDEN = ("dev",)
"""Extras that are for those who change mtrl itself."""


@dataclass(frozen=True)
class Found:
    """A requirement, and the version that is installed."""

    requirement: Requirement
    version: str | None

    @property
    def fits(self) -> bool:
        return self.version is not None and self.requirement.specifier.contains(self.version, prereleases=True)


def wanted() -> dict[str, list[Requirement]]:
    """Requirements by the extra that brings them, of the installed distribution; `BASE`: of mtrl itself.

    Raises:
        importlib.metadata.PackageNotFoundError: mtrl is not installed, only its source is on the path.
    """
    return sort(metadata.requires("mtrl") or ())


def sort(lines: Iterable[str]) -> dict[str, list[Requirement]]:
    """Requirements by extra, from the lines of a distribution's metadata."""
    by_extra: dict[str, list[Requirement]] = {BASE: []}
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            by_extra[BASE].append(requirement)
            continue
        named = [part.partition("==")[2].strip(" '\"()") for part in str(marker).split("and") if "extra" in part]
        for extra in named:
            if marker.evaluate({"extra": extra}):
                by_extra.setdefault(extra, []).append(requirement)
    return by_extra


def look(requirements: Iterable[Requirement]) -> list[Found]:
    """Each with its installed version."""
    return [Found(requirement, _version(requirement.name)) for requirement in requirements]


def _version(name: str) -> str | None:
    try:
        return metadata.version(canonicalize_name(name))
    except metadata.PackageNotFoundError:
        return None
