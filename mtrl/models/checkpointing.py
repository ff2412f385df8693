"""Gradient checkpointing without what comes with training mode."""

from __future__ import annotations

from typing import Any


def checkpoint_gradients(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    Layers do so in training mode only; everything else stays in evaluation mode, dropout of attention included: the
    log-probs of training must be those of sampling.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.eval()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
