"""The backends, in which the commands of an episode run: the sandbox and container engines."""

from __future__ import annotations

from mtrl.errors import UserError

BACKENDS = ("sandbox", "docker", "podman")


def check_backend(backend: str) -> None:
    """Raise a UserError if rows of this family cannot run on a backend."""
    if backend in BACKENDS:
        return
    choices = f"choose one of {', '.join(BACKENDS)}"
    if backend == "swerex":
        raise UserError(
            "environment.config.backend=swerex runs tasks of environment=terminal: an episode of mini_swe needs two "
            "fresh containers of the image of its row, and a server of SWE-ReX is one container of any image; "
            f"{choices}"
        )
    raise UserError(f"environment.config.backend={backend} is not known; {choices}")
