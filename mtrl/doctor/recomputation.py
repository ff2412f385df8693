"""The number of layers that a run recomputes in its backward pass, by the memory that it leaves."""

from __future__ import annotations

import copy

from mtrl.doctor.changes import Change, apply, recomputing
from mtrl.doctor.memory import Memory


def fewest_recomputed(memory: Memory) -> Change:
    """Return the settings with which the fewest layers are recomputed while each phase that they affect leaves
    `COMFORT` of the memory.

    The result is empty if no smaller number of layers than that of the configuration suffices.
    """
    present, fewest = memory.moments(), int(memory.config.trainer.activation_offload)  # which needs a recomputed layer
    for count in range(fewest, memory.recomputed_layers):
        change = recomputing(memory.config, count, memory.model)
        changed = copy.deepcopy(memory.config)
        apply(changed, change)
        phases = zip(Memory(changed, memory.model, memory.device).moments(), present, strict=True)
        if all(new.is_comfortable or new.needed == old.needed for new, old in phases):
            return change
    return {}
