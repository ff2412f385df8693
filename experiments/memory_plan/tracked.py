"""Hold the memory plan against the tensors that a rank of a large model allocates, without its GPUs.

    python experiments/memory_plan/tracked.py Qwen/Qwen3-32B --ranks 8 --tokens 16384

Rank 0 of a process group without other processes runs the forward and the backward pass of one micro-batch with
tensors that have shapes and no memory (FakeTensorMode). The model is sharded as in a run (`mtrl.distributed.sharding`),
with recomputation, in bfloat16 from float32 weights. PyTorch's FSDP2 memory tracker counts every tensor. Attention is
PyTorch's, and only 64 of the tokens are sampled, so that their logits take almost nothing. The largest phase of the
plan is taken without what tensors do not show, the allowances for the process and fragmentation, and without the
moments of Adam, which the tracked passes do not have.
"""

from __future__ import annotations

import argparse
import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed import sharding
from mtrl.distributed.meshes import make_meshes
from mtrl.distributed.world import World
from mtrl.doctor.architecture import table
from mtrl.doctor.layout import GIB
from mtrl.doctor.plan import make_plan
from mtrl.models.logprobs import token_logprobs
from mtrl.models.preparation import checkpoint_gradients

CAUSAL = "causal_sdpa"
"""Name of the attention in Transformers."""
SAMPLED = 64
"""Number of sampled tokens of the micro-batch."""
PER_MACHINE = 8
PASSES = ("log-probs", "backward of a layer", "end of backward")
"""Phases of the plan that the tracked passes have."""
UNSEEN = ("process", "slack", "moments of Adam", "logits")
"""Parts of the plan that the tracked passes do not have."""


def causal(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute `sdpa` attention without a mask. Transformers makes one if tensors have no values, unlike in a run."""
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


AttentionInterface.register(CAUSAL, causal)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


def tracked(path: str, ranks: int, tokens: int, recomputed: int | None = None) -> float:
    """Return the peak of a rank's tensors in the second of two passes, in bytes.

    Args:
        recomputed: number of layers that are recomputed; None: all.
    """
    fields = dict(table()[path])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    settings = FsdpConfig(param_dtype="bfloat16")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    meshes = make_meshes(settings, ranks, torch.device("cpu"))
    sharding.make_meshes = lambda *_: meshes  # made outside of the mode, in which its tensors would have no values
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        model.set_attn_implementation(CAUSAL)
        if recomputed != 0:
            checkpoint_gradients(model, recomputed)
        sharding.shard(model, settings, World(size=ranks))
        ids = torch.zeros(1, tokens, dtype=torch.long)
        positions = (torch.zeros(SAMPLED, dtype=torch.long), torch.arange(SAMPLED))
        tracker = FSDPMemTracker(model)
        with tracker:
            for number in range(2):
                found, _ = token_logprobs(model, positions, ids[0, :SAMPLED], input_ids=ids, use_cache=False)
                found.sum().backward()
                if number == 0:
                    tracker.reset_mod_stats()
    dist.destroy_process_group()
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    return counted["Total"]


def planned(path: str, ranks: int, tokens: int, recomputed: int | None = None) -> float:
    """Return the largest of these phases by the plan, in bytes."""
    machines = max(1, ranks // PER_MACHINE)
    plan = make_plan(
        [
            *("model=hf", f"model.path={path}", "generator=vllm", f"generator.max_context_length={tokens}"),
            *(f"placement.machines={machines}", f"placement.ranks={ranks // machines}", "placement.gpus=64"),
            *(f"trainer.gradient_checkpointing={str(recomputed != 0).lower()}", "trainer.fsdp.param_dtype=bfloat16"),
            f"trainer.recomputed_layers={recomputed or 'null'}",
            f"trainer.max_tokens_per_microbatch={tokens}",
        ]
    )
    passes = [moment for moment in plan.moments if moment.when in PASSES]
    return max(sum(part.bytes for part in moment.parts if part.name not in UNSEEN) for moment in passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="one of the models of mtrl/doctor/architectures.yaml")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the micro-batch")
    parser.add_argument("--recomputed", type=int, help="number of layers that are recomputed (default: all)")
    parser.add_argument("--layers", type=int, help="take so many layers of the model (default: all)")
    args = parser.parse_args()
    if args.layers:
        table()[args.path]["num_hidden_layers"] = args.layers
    with redirect_stdout(StringIO()):
        counted = tracked(args.path, args.ranks, args.tokens, args.recomputed)
    expected = planned(args.path, args.ranks, args.tokens, args.recomputed)
    row = {"model": args.path, "ranks": args.ranks, "tokens": args.tokens}
    row |= {"tracked_gib": round(counted / GIB, 2), "planned_gib": round(expected / GIB, 2)}
    print(json.dumps(row | {"planned_over_tracked": round(expected / counted, 3)}))


if __name__ == "__main__":
    main()
