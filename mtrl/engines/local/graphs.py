"""The fused forward pass on a GPU, with decode steps replayed as CUDA graphs.

A decode step of a small model is about 430 kernels of a few microseconds, which Python launches more slowly than the
GPU runs them. A graph launches all of them at once. Its shapes are fixed, so a graph exists for each number of rows and
each width of attention, both rounded up; rows and keys beyond the real ones are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mtrl.config.derived import doubled_capacity
from mtrl.engines.local.cache import SlotCache
from mtrl.engines.local.fused import FusedRunner

WARM_UPS = 2
"""Number of passes before the capture of a graph, in which libraries choose kernels and allocate their workspaces."""

STEP_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""Kernels of attention in decode steps. cuDNN's is the fastest; it builds a plan for each shape, of which graphs have
few (`mtrl.models.attention` switches it off elsewhere)."""


def rounded_rows(rows: int) -> int:
    """Round a number of rows up to one of eight in each power of two, so that few graphs serve all batches."""
    return _rounded(rows, 1, 8)


def rounded_width(width: int) -> int:
    """Round a number of keys up to a multiple of 128, and above 1,024 to one of four in each power of two."""
    return _rounded(width, 128, 4)


def _rounded(count: int, least: int, steps: int) -> int:
    octave = 2 ** (max(1, count) - 1).bit_length() // 2  # the power of two below
    step = max(least, octave // steps)
    return -(-count // step) * step


class GraphCache(SlotCache):
    """A cache with one more row, `spare`, that no trajectory holds: rows that only fill up a graph write there. Its
    capacity grows by doubling, because every growth captures the graphs anew."""

    def rounded(self, capacity: int) -> int:
        return doubled_capacity(capacity)

    @property
    def spare(self) -> int:
        return self.slots

    def _allocated(self, slots: int) -> int:
        return slots + 1


class CudaRunner(FusedRunner):
    """See `runner.Runner`. Attention uses the memory-efficient kernel, which takes a mask, and as many heads of keys as
    of queries. Widths are multiples of 128, since it needs aligned masks."""

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        return super().forward(ids, starts, lengths, first_slot, min(rounded_width(width), self.cache.capacity))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        n, heads, t, dim = queries.shape
        if t == 1:  # the heads that share keys are the rows of one head
            rows = queries.reshape(n, self.kv_heads, -1, dim)
            return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).reshape(n, heads, 1, dim)
        shared = heads // self.kv_heads
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


class GraphRunner(CudaRunner):
    """See `runner.Runner`."""

    Cache = GraphCache

    def __init__(self, model: Any):
        super().__init__(model)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """Decode steps by number of rows and width."""
        self._captured: tuple[int, ...] = ()
        """Sizes of the cache and addresses of the memory that the graphs use; with others they are invalid. A smaller
        cache may lie at the addresses of a larger one that was freed."""
        self._logits_of_step = torch.empty(0)
        """Logits [slots, V] of the last decode step, which all graphs write, so that they share the other memory."""
        self._pool: Any = None

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        if ids.shape[1] > 1 or first_slot > 0:
            return super().forward(ids, starts, lengths, first_slot, width)
        self._prepare()
        rows = min(rounded_rows(len(ids)), self.cache.slots)
        width = min(rounded_width(width), self.cache.capacity)
        if (rows, width) not in self._graphs:
            self._graphs[rows, width] = _Graph(self, rows, width)
        return self._graphs[rows, width].replay(ids, starts)

    def capture(self, ids: Tensor, starts: Tensor, slots: Tensor, width: int) -> tuple[Any, Tensor]:
        """Return the graph of a decode step, and its logits [rows, V], which the next decode step overwrites.

        Args:
            ids: [rows, 1] the last token of each row; the graph reads it at each replay, like the other tensors.
            starts: [rows] number of tokens that each row holds.
            slots: [rows, 1] slot to which each row writes its keys and values.
        """
        logits = self._logits_of_step[: len(ids)]

        def decode() -> None:
            logits.copy_(self._logits(self._hidden(ids, starts[:, None], slots, 0, width)[:, 0]))

        graph = captured(decode, self._pool, ids.device)
        self._pool = graph.pool()
        return graph, logits

    def _prepare(self) -> None:
        """Discard the graphs if the memory that they use was replaced."""
        self._reserve_rope(self.cache.capacity)
        head = self.model.lm_head.weight
        if len(self._logits_of_step) < self.cache.slots:
            self._logits_of_step = head.new_empty(self.cache.slots, len(head))
        held = (*self.cache.keys, *self.cache.values, self._cos, self._sin, self._logits_of_step)
        used = (self.cache.slots, self.cache.capacity, *(tensor.data_ptr() for tensor in held))
        if used != self._captured:
            self._graphs, self._captured, self._pool = {}, used, None

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        if queries.shape[2] > 1 or queries.dtype == torch.float32:  # which cuDNN's attention does not support
            return super()._attend(queries, keys, values, mask)
        with sdpa_kernel(STEP_KERNELS):
            return FusedRunner._attend(self, queries, keys, values, mask)


def captured(work: Callable[[], None], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """Return the graph of the kernels that `work` launches on a GPU.

    Args:
        pool: memory pool of other graphs whose results are not needed during a replay; None: a new pool.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the trainer's, may use the GPU during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
    return graph


class _Graph:
    """A decode step of fixed shape."""

    def __init__(self, runner: GraphRunner, rows: int, width: int):
        device, spare = runner.cache.device, runner.cache.spare
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._starts = torch.zeros(rows, dtype=torch.long, device=device)
        self._slots = torch.full((rows, 1), spare, device=device)
        self._graph, self._logits = runner.capture(self._ids, self._starts, self._slots, width)
        self._own, self._spare = torch.arange(rows, device=device)[:, None], spare
        self._filled = 0
        """Number of rows of the last step that were no fillers."""

    def replay(self, ids: Tensor, starts: Tensor) -> Tensor:
        """Return the logits [n, V] of the first n rows; the other rows are fillers."""
        n = len(ids)
        if n != self._filled:
            self._slots[:n] = self._own[:n]
            self._slots[n:] = self._spare
            self._starts[n:] = 0
            self._filled = n
        self._ids[:n] = ids
        self._starts[:n] = starts
        self._graph.replay()
        return self._logits[:n]
