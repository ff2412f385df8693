"""Comparison of the installed packages with the requirements of setup.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BASE = ""
"""Key of the requirements that belong to no extra."""
HIDDEN = ("dev",)
"""Extras for development of mtrl itself."""


@dataclass(frozen=True)
class InstalledPackage:
    """A requirement, and the version that is installed."""

    requirement: Requirement
    version: str | None

    @property
    def fits(self) -> bool:
        return self.version is not None and self.requirement.specifier.contains(self.version, prereleases=True)


def wanted() -> dict[str, list[Requirement]]:
    """Return the requirements of the installed distribution by extra; `BASE` is the key of those of mtrl itself.

    Raises:
        importlib.metadata.PackageNotFoundError: mtrl-agents is not installed, only its source is on the path.
    """
    return sort(metadata.requires("mtrl-agents") or ())


def sort(lines: Iterable[str]) -> dict[str, list[Requirement]]:
    """Return the requirements by extra, from the lines of a distribution's metadata."""
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


def look(requirements: Iterable[Requirement]) -> list[InstalledPackage]:
    """Return each requirement with its installed version."""
    return [InstalledPackage(requirement, _version(requirement.name)) for requirement in requirements]


def _version(name: str) -> str | None:
    try:
        return metadata.version(canonicalize_name(name))
    except metadata.PackageNotFoundError:
        return None
