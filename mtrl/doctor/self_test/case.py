"""The cases of a self-test: each is one path of a training run, in processes of its own. This module does not import
torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from mtrl.config.derived import engine_installation, engine_python
from mtrl.doctor.self_test.bench import Bench
from mtrl.errors import UserError

HERE = "mtrl.doctor.self_test"


@dataclass(frozen=True)
class Case:
    """One path that the self-test runs."""

    name: str
    """Name of its line; at most 16 characters."""
    function: str
    """MODULE:FUNCTION, which gets the `Bench` and returns a `CaseResult` on rank 0."""
    seconds: float
    """Time limit."""
    ranks: int = 1
    """Number of processes, each with a GPU if there are GPUs."""
    gpus: int = 1
    """Number of GPUs that it needs on a machine with GPUs."""
    only_gpu: str = ""
    """Reason why it is skipped on a CPU; empty: it runs there."""
    engine: str = ""
    """Name of the engine that it needs; empty: none."""
    modules: tuple[str, ...] = ()
    """Modules of which one must be installed; empty: none."""
    versions: tuple[tuple[str, int, int], ...] = ()
    """Packages with the lowest version that the case needs."""

    def reason_to_skip(self, bench: Bench) -> str:
        """Return why the case cannot run on this machine; empty if it can."""
        if self.only_gpu and not bench.on_gpu:
            return self.only_gpu
        needed = max(self.gpus, self.ranks)
        if bench.on_gpu and bench.gpus < needed:
            return f"{self.name} needs {needed} GPUs, and this machine has {bench.gpus}"
        if self.modules and not any(map(find_spec, self.modules)):
            return f"none of these packages is installed: {', '.join(self.modules)}"
        for package, *needed in self.versions:
            installed = version(package)
            if [*map(int, installed.split(".")[:2])] < needed:
                return f"it needs {package} {needed[0]}.{needed[1]}, and {installed} is installed"
        if self.engine:
            try:
                engine_python(self.engine, None)
            except UserError:
                return f"{self.engine} is not installed; {engine_installation(self.engine)}"
        return ""


FLASH = {"flash_attn_interface": "flash_attention_3", "flash_attn": "flash_attention_2"}
"""`model.attn_implementation` by the module of its package."""
DIVIDES = (("torch", 2, 13), ("transformers", 5, 23))
"""Versions that divide models among ranks (`mtrl.distributed.plans`)."""
MODEL = Case("model", f"{HERE}.random_model:build", 120)
_MEMORY = "sleeping frees GPU memory, and this machine has no GPU"
CASES = (
    Case("matrix products", f"{HERE}.products:products", 60),
    Case("local eager", f"{HERE}.rollouts:local_eager", 90),
    Case("local graphs", f"{HERE}.rollouts:local_graphs", 90, only_gpu="CUDA graphs need a GPU"),
    Case("update float32", f"{HERE}.updates:update_float32", 90),
    Case("update bfloat16", f"{HERE}.updates:update_bfloat16", 90),
    Case(
        "update flash",
        f"{HERE}.updates:update_flash",
        90,
        only_gpu="FlashAttention's package needs a GPU",
        modules=tuple(FLASH),
    ),
    Case("update compiled", f"{HERE}.updates:update_compiled", 120, only_gpu="compiling is measured on GPUs only"),
    Case("micro-batches", f"{HERE}.updates:micro_batch_sizes", 90),
    Case("gradients", f"{HERE}.gradients:gradients", 90),
    Case("recomputation", f"{HERE}.recomputation:recomputation", 90),
    Case("fsdp", f"{HERE}.sharding:fsdp", 90),
    Case("fsdp offload", f"{HERE}.sharding:fsdp_offload", 90),
    Case("fsdp 2 ranks", f"{HERE}.sharding:fsdp", 90, ranks=2),
    Case("offload 2 ranks", f"{HERE}.sharding:fsdp_offload", 90, ranks=2),
    Case("sequence 2 ranks", f"{HERE}.sharding:sequence_parallel", 90, ranks=2),
    Case("tensor 2 ranks", f"{HERE}.sharding:tensor_parallel", 90, ranks=2, versions=DIVIDES),
    Case("experts 2 ranks", f"{HERE}.sharding:expert_parallel", 90, ranks=2, versions=DIVIDES),
    Case("router replay", f"{HERE}.rollouts:router_replay", 90),
    Case("resume", f"{HERE}.resume:resume", 90),
    Case("sync by file", f"{HERE}.transfer:by_file", 60),
    Case("sync by memory", f"{HERE}.transfer:by_memory", 60),
    Case("sync broadcast", f"{HERE}.transfer:by_broadcast", 60, gpus=2),
    Case("vllm", f"{HERE}.servers:vllm", 240, engine="vllm"),
    Case("vllm sleep", f"{HERE}.servers:vllm_sleep", 240, only_gpu=_MEMORY, engine="vllm"),
    Case("sglang", f"{HERE}.servers:sglang", 240, engine="sglang"),
    Case("sglang sleep", f"{HERE}.servers:sglang_sleep", 240, only_gpu=_MEMORY, engine="sglang"),
)
"""All cases in their order; a model is needed for each."""
