"""Comparison of the software of a rollout worker's machine with that of the leader."""

from __future__ import annotations

from collections.abc import Mapping

from mtrl.errors import UserError

UNUSED = {"vllm", "sglang"}
"""Packages that workers do not use, so that machines may have different versions, or none."""


def check_versions(leader: Mapping[str, str], worker: Mapping[str, str]) -> None:
    """Check that a worker has the versions of the leader: with others it may sample other tokens, or cannot read what
    the leader sends.

    Args:
        leader, worker: versions by name, as `mtrl.utils.provenance.versions` returns them.

    Raises:
        UserError: a version differs, or only one of the two has a package.
    """
    names = sorted((leader.keys() | worker.keys()) - UNUSED)
    pairs = [(name, worker.get(name, "none"), leader.get(name, "none")) for name in names]
    if other := [f"{name} {found} instead of {expected}" for name, found, expected in pairs if found != expected]:
        raise UserError(f"this machine has {', '.join(other)}; install the versions that rank 0 has")
