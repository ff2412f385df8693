"""A value model: the body of a causal LM with a head that returns one number per position instead of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtrl.errors import UserError


class ValueModel(nn.Module):
    """Predicts the rewards that are still to come. The first values are 0, so that the advantages of a new critic
    depend only on the rewards.

    No logits are computed: the language model's head is dropped, together with operations on logits (soft caps,
    scales), which would distort values. Forwards go through this module, as FSDP2 (`fully_shard`) requires of a root.
    """

    def __init__(self, causal_lm: Any):
        """Use the body of `causal_lm`, which is not copied.

        Raises:
            UserError: the architecture has no body that is separate from its head.
        """
        super().__init__()
        self.body = causal_lm.base_model
        if self.body is causal_lm:
            raise UserError(
                f"{type(causal_lm).__name__} has no body apart from its head to put a critic on; give another model as "
                "algorithm.critic.path, or take an algorithm.advantage_method without a critic"
            )
        width = causal_lm.get_output_embeddings().weight.shape[-1]
        dtype = torch.promote_types(causal_lm.dtype, torch.float32)  # small differences between values matter
        # The head has values also where the body has no weights in memory, since no file has them. The random
        # initialisation is skipped, since it would change the global random state.
        device = "cpu" if causal_lm.device.type == "meta" else causal_lm.device
        self.head: nn.Linear = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, chosen: Tensor, **inputs: Any) -> Tensor:
        """Return the values [N] at the positions of the mask `chosen`, [B, L], in the order of rows.

        Args:
            inputs: inputs of the body, [B, L] each.
        """
        hidden = self.body(**inputs, use_cache=False).last_hidden_state[chosen]
        values = self.head(hidden.to(self.head.weight.dtype))
        return values.squeeze(-1).clone()  # not a view, since FSDP2 has a hook on the root's output
