"""Gradient checkpointing without what comes with training mode."""

from __future__ import annotations

from typing import Any


def checkpoint_gradients(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    Layers do so in training mode only; everything else stays in evaluation mode, dropout of attention included: the
    log-probs of training must be those of sampling.
    """
    # Its name in Transformers 6, and the one of early 5.x, of which later ones warn.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.eval()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
