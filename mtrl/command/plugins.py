"""Plugins: the user's own modules, imported before the checks, so that the functions they register can be named."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl.errors import UserError
from mtrl.utils.user_code import reason


def import_plugins(modules: Sequence[str]) -> None:
    """Import the modules, in order; a module that is already imported is not imported again.

    Raises:
        UserError: a module cannot be imported, for any reason.
    """
    if not modules:
        return
    from mtrl.utils.process_guard import import_guarded  # imports asyncio, which --help does not need

    _take_our_names()
    for module in modules:
        try:
            import_guarded(module)
        except Exception as error:
            is_absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            fix = "write package.module, of the folder where you start or installed" if is_absent else "mend the module"
            raise UserError(f"plugins=[{module}] cannot be imported ({reason(error)}); {fix}") from error


def _take_our_names() -> None:
    """Register the built-in functions first, so that a plugin that uses one of their names gets an error."""
    from mtrl.algorithms import registry
    from mtrl.rewards.shaping import SHAPINGS

    ours = (registry.ESTIMATORS, registry.LOSSES, registry.REDUCTIONS, registry.CORRECTIONS, registry.KL_ESTIMATORS)
    for known in (*ours, SHAPINGS):
        known.names()
