"""Gradient checkpointing without the other effects of training mode."""

from __future__ import annotations

from typing import Any


def checkpoint_gradients(model: Any) -> None:
    """Recompute activations in the backward pass instead of storing them.

    Transformers' layers do this only in training mode, so these layers are switched to it. All other modules, including
    attention with its dropout, stay in evaluation mode, because the log-probs of training must equal those of sampling.
    """
    # The first name is that of Transformers 6; the second is that of early 5.x, which later versions deprecate.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.eval()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
