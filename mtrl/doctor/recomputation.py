"""The number of layers that a run recomputes in its backward pass, by the memory that it leaves."""

from __future__ import annotations

import copy

from mtrl.doctor.changes import Change, apply, recomputing
from mtrl.doctor.memory import Memory


def fewest_recomputed(memory: Memory) -> Change:
    """Return the settings with which the fewest layers are recomputed while each phase leaves `COMFORT` of the memory.

    The result is empty if no smaller number of layers than that of the configuration suffices.
    """
    for count in range(memory.recomputed_layers):
        change = recomputing(memory.config, count, memory.model)
        changed = copy.deepcopy(memory.config)
        apply(changed, change)
        if all(moment.is_comfortable for moment in Memory(changed, memory.model, memory.device).moments()):
            return change
    return {}
