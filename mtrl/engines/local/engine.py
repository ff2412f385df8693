"""The embedded engine: continuous batching in this process. The cache of a trajectory persists across its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.distributed.gathered import GatheredWeights, layout_of
from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.local import fused
from mtrl.engines.local.batch import DecodeBatch, EngineSession, SampleRequest
from mtrl.engines.local.graphs import CudaRunner, GraphRunner
from mtrl.engines.local.half import HalfRunner
from mtrl.engines.local.prefill import PrefillPlan, SharedPrefix, pass_cost_on, passes, plan_prefill
from mtrl.engines.local.runner import HfRunner, ModelRunner
from mtrl.engines.local.stop_strings import StopStrings
from mtrl.engines.local.weight_storages import WeightStorages
from mtrl.models.experts import chosen_experts, recorded, routers_of
from mtrl.types import FinishReason, Generation
from mtrl.utils.expert_ids import ExpertIds
from mtrl.utils.heap import Heap


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the module's parameters and buffers in place, converting device and dtype. Views of the
    parameters, as in the fused decode step, stay valid.

    Weights that do not fit are refused before the first parameter is written: an engine with some old weights would
    sample from a policy that is not the trained one, without any error. If they are gathered over ranks
    meanwhile, the loss of a rank ends the run.

    Args:
        weights: tensors by the names of `module.state_dict()`; for tied parameters one name is enough.

    Raises:
        ValueError: a parameter has no weights, a name does not exist in the module, or a shape differs.
    """
    own = module.state_dict(keep_vars=True)
    given = layout_of(weights)
    written = {id(own[name]) for name in given if name in own}
    missing = [name for name, value in module.named_parameters() if id(value) not in written]
    unknown = [name for name in given if name not in own]
    wrong = [name for name in given if name in own and given[name].shape != own[name].shape]
    problems = [
        *([f"no weights for {_some(missing)}"] if missing else []),
        *([f"no parameter has the name {_some(unknown)}"] if unknown else []),
        *([f"another shape for {_some(wrong)}"] if wrong else []),
    ]
    if problems:
        raise ValueError(f"the weights do not fit {type(module).__name__}: {'; '.join(problems)}")
    for name in weights:
        own[name].copy_(weights[name])


class LocalEngine:
    """See `mtrl.engines.base.Engine`. The engine uses the model's own weights: training changes them in
    place, and `load_weights` notifies the engine that they have changed. A replica, which is not trained, receives its
    weights through `load_weights`.

    Scheduling. The decoding rows are the first slots of the cache. When the turn of a trajectory ends, its environment
    runs while the other rows continue to decode. When a quarter of the rows have ended (or no row decodes), the engine
    *gathers*: it prefills all waiting turns together. With `deterministic`, a gather first waits until every trajectory
    that is not decoding has requested its next turn or was released. The composition of a batch then depends on tokens
    alone, never on time, and a resumed run repeats the numbers of the first one bit for bit. Without `deterministic`, a
    gather takes the turns that are waiting.

    Memory. When the last open trajectory is released, such as at the end of a step's rollouts, the cache and the packed
    copies of matrices are freed.

    New weights. A deterministic engine accepts new weights only between turns. Otherwise `in_flight` determines how
    they affect turns that are being sampled. Under "continue", sampling stops between two tokens, the sampled tokens
    keep their policy version, the turn's whole context is prefilled again, and sampling continues. Under "drain",
    running turns end first, while new turns wait. No token attends to keys and values of older weights.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_num_seqs: int = 128,
        max_context_length: int = 4096,
        fused_decode: bool = True,
        deterministic: bool = True,
        in_flight: str = "continue",
        apply_weights: Callable[[Any, Mapping[str, Tensor]], None] = copy_weights,
        cache_bytes: int | None = None,
        cuda_graphs: bool = True,
        record_experts: bool = False,
    ):
        """
        Args:
            model: a causal language model of Hugging Face.
            tokenizer: decodes tokens for the search for stop strings.
            max_num_seqs: maximum number of trajectories that hold a slot of the cache at once.
            max_context_length: maximum number of tokens of a whole conversation.
            fused_decode: use the fused decode step where the architecture has one.
            deterministic, in_flight: see above.
            apply_weights: function that writes the weights passed to `load_weights` into the model, in place. It must
                copy the tensors, because they may be overwritten later.
            cache_bytes: maximum number of bytes of the cache when all its rows have the maximum length; it lowers
                `max_num_seqs`, to 1 at least. None: no limit.
            cuda_graphs: replay the steps of the fused decode step as CUDA graphs, if the model is on a GPU.
            record_experts: return the experts of a mixture that computed the tokens (`Generation.experts`).

        Raises:
            UserError: the engine cannot run this model.
        """
        self.runner = self._make_runner(model, fused_decode, cuda_graphs)
        self.model, self.stops = model, StopStrings(tokenizer)
        self._heap = Heap(sum(p.numel() for p in model.parameters()))
        self._routers = routers_of(model) if record_experts else []
        if cache_bytes is not None:
            rows = cache_bytes // self.runner.cache.row_bytes(max_context_length)
            max_num_seqs = max(1, min(max_num_seqs, rows))
        self.max_num_seqs, self.max_context_length = max_num_seqs, max_context_length
        self.deterministic = deterministic
        self.apply_weights = apply_weights
        assert in_flight in ("continue", "drain"), f"in_flight={in_flight}"
        self.in_flight = in_flight
        self.version = 0
        self.stats = EngineStats()
        self._sessions: dict[str, EngineSession] = {}
        self._opened = 0
        self._rows: list[EngineSession] = []
        """Trajectories that hold a slot, in the order of the slots; the decoding ones come first."""
        self._batch: DecodeBatch | None = None
        self._shrink = False
        """Whether a decoding trajectory was released, so that its row is decoded without a use."""
        self._gathered = 0
        """Number of decoding rows after the last gather."""
        self._draining = 0
        """Number of calls of `load_weights` that wait for the end of running turns or for weights; no turn is admitted
        meanwhile."""
        self.freed_weights: WeightStorages | None = None
        """The storages of the weights from `sleep` to `load_weights`; no turn is admitted meanwhile."""
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def _make_runner(self, model: Any, fused_decode: bool, cuda_graphs: bool) -> ModelRunner:
        return make_runner(model, fused_decode, cuda_graphs)

    def open(self, trajectory_id: str) -> None:
        self._sessions[trajectory_id] = EngineSession(trajectory_id, self._opened)
        self._opened += 1

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        if len(prompt) >= self.max_context_length:
            return Generation([], [], FinishReason.LENGTH, [])
        if trajectory_id not in self._sessions:
            self.open(trajectory_id)
        session = self._sessions[trajectory_id]
        assert session.request is None, f"{trajectory_id} requests a turn before its last one ended"
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        session.request = SampleRequest(prompt, sampling, future)
        self._ensure_running()
        self._wake.set()
        return await future

    def release(self, trajectory_id: str) -> None:
        session = self._sessions.pop(trajectory_id, None)
        if session is None:
            return
        session.released = True
        if self._batch is not None and session in self._batch.sessions:
            self._batch.flush(self.version)
            self._shrink = True
        session.finish(FinishReason.ABORT)
        if not self._sessions:
            self._discard_rows()
        self._wake.set()

    async def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Sample under these weights as policy `version` from now on. None: the shared module has them already.

        Raises:
            ValueError: the weights do not fit the model; the old ones and their version stay in use.
        """
        await self._stop()
        if isinstance(weights, GatheredWeights):  # which waits for other ranks, and the event loop must go on
            self._draining += 1
            try:
                await asyncio.to_thread(self.apply_weights, self.model, weights)
            finally:
                self._draining -= 1
                self._wake.set()  # waiting turns were not admitted meanwhile
        elif weights is not None and weights is not self.model:
            self.apply_weights(self.model, weights)
        self.runner.refresh()
        self._heap.trim()  # whole tensors were gathered
        self.version, self.freed_weights = version, None
        self._wake.set()

    async def sleep(self) -> None:
        """Free the memory of the weights, which must be a copy of the trainer's."""
        await self._stop()
        self.runner.refresh()
        self.freed_weights = WeightStorages(self.model)
        self.freed_weights.free()

    async def wake(self) -> None:
        """Allocate the memory of the weights again; `load_weights` must follow."""
        assert self.freed_weights is not None
        self.freed_weights.allocate()

    async def _stop(self) -> None:
        """Stop sampling, as `in_flight` determines, because the weights change."""
        assert not (self.deterministic and self._batch), "weights change only between turns"
        if self.in_flight == "drain":
            await self._drain()
        self._interrupt()

    async def _drain(self) -> None:
        """Wait until the turns that are being sampled end; admit no other turns meanwhile."""
        self._draining += 1
        try:
            while self._batch is not None:
                self._ensure_running()
                self._idle.clear()
                await self._idle.wait()
        finally:
            self._draining -= 1
            self._wake.set()

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for trajectory_id in list(self._sessions):
            self.release(trajectory_id)

    def _ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._wake, self._idle = asyncio.Event(), asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                with torch.inference_mode():
                    busy = self._advance()
                if self._batch is None:
                    self._idle.set()
                if not busy:
                    self._wake.clear()
                    await self._wake.wait()
                await asyncio.sleep(0)
        except Exception as error:  # every waiting caller must get the error, or it would wait forever
            self._discard_rows()
            for session in self._sessions.values():
                request, session.request = session.request, None
                if request and not request.future.done():
                    request.future.set_exception(error)

    def _advance(self) -> bool:
        """Do the next piece of work; return False if there is none before the next request or release."""
        if self._shrink:
            self._regroup()
        if self._may_gather():
            self._gather()
        elif self._batch is not None and not self._due():
            self._decode()
        else:
            return False
        return True

    def _discard_rows(self) -> None:
        """Discard the decoding rows, and free the cache and the packed matrices. With many trajectories they take
        several times the memory of the weights, which an update needs."""
        for session in self._rows:
            session.slot = None
            session.cut(0)
        self._rows, self._batch, self._shrink = [], None, False
        self.runner.cache.clear()
        self.runner.refresh()
        self._heap.trim()
        self._idle.set()

    def _interrupt(self) -> None:
        """Discard the cache; unfinished turns keep their sampled tokens and wait to be prefilled again."""
        self._decoding()
        self._batch, self._shrink = None, False
        for session in self._rows:
            session.discard_cache()
        self._wake.set()

    def _due(self) -> bool:
        """Whether decoding should pause for a gather: the engine is deterministic, and a quarter of the rows that
        decoded after the last gather have ended."""
        decoding = len(self._batch.sessions) if self._batch else 0
        return self.deterministic and self._gathered - decoding >= max(1, self._gathered // 4)

    def _may_gather(self) -> bool:
        if self._draining or self.freed_weights is not None:
            return False
        decoding = set(self._batch.sessions) if self._batch else set()
        if self.deterministic:
            others = [s for s in self._sessions.values() if s not in decoding]
            answered = all(s.request is not None for s in others)
            return answered and (self._due() or bool(others and not decoding))
        admissible = len(self._admissible(decoding))
        return admissible > 0 and admissible >= len(decoding) // 3

    def _admissible(self, decoding: Collection[EngineSession]) -> list[EngineSession]:
        """Trajectories with a waiting turn that hold a slot or can get one. Those with a slot come first."""
        waiting = [s for s in self._sessions.values() if s.request is not None and s not in decoding]
        held = [s for s in waiting if s.slot is not None]
        free = self.max_num_seqs - sum(not s.released for s in self._rows)
        fresh = sorted((s for s in waiting if s.slot is None), key=lambda s: s.order)
        return held + fresh[:free]

    def _gather(self) -> None:
        """Prefill the waiting turns and add them to the decoding rows."""
        decoding = self._decoding()
        admitted = self._admissible(set(decoding))
        if admitted:
            decoding = self._admit(decoding, admitted)
        self._gathered = len(decoding)
        self._batch = self._new_batch(decoding) if decoding else None

    def _admit(self, decoding: list[EngineSession], admitted: list[EngineSession]) -> list[EngineSession]:
        """Prefill `admitted`, sample their first tokens, and return all trajectories that decode from now on."""
        for session in admitted:
            request = session.request
            session.cut(session.common_prefix(request.context))
            request.record_cached(len(session.ids))
            self.stats.prompt_tokens += len(request.context)
        plan = plan_prefill(admitted, self._pass_cost)
        decoding = self._arrange(decoding, plan.sessions)
        logits = self._prefill(plan)
        first = self._new_batch(plan.sessions)
        first.take(logits)
        self._heap.trim()
        self._settle(first)
        return self._arrange([s for s in [*decoding, *first.sessions] if s.request is not None])

    @property
    def _pass_cost(self) -> int:
        return pass_cost_on(self.model.device.type)

    def _prefill(self, plan: PrefillPlan) -> Tensor:
        """Feed and copy as planned, and return the logits [len(plan.sessions), V] after each context."""
        longest = max(len(s.request.context) for s in plan.fed)
        held = max(len(s.ids) for s in self._rows)
        self.runner.cache.fit(len(self._rows), max(held, longest) + 1)
        self.stats.cached_tokens += sum(len(s.ids) for s in plan.fed)
        for prefix in plan.prefixes:
            self._feed_prefix(prefix)
        parts = [self._feed(sessions) for sessions in passes(plan.fed, self._pass_cost)]
        for session in plan.fed:
            session.ids = list(session.request.context)
        logits = torch.cat(parts)
        if plan.copies:
            sources = [source.slot for _, source in plan.copies]
            self.runner.cache.move(sources, [copy.slot for copy, _ in plan.copies], longest)
            for copy, source in plan.copies:
                copy.ids, copy.experts = list(source.ids), source.experts
                self._count_cached(copy, len(copy.ids) - 1)
            logits = torch.cat((logits, logits[[slot - plan.fed[0].slot for slot in sources]]))
        return logits

    def _feed_prefix(self, prefix: SharedPrefix) -> None:
        """Feed a shared prefix in the slot of its first session, and copy it to the slots of the others."""
        first, *others = prefix.sessions
        _, (experts,) = self._forward([first.request.context[: prefix.length]], [0], first.slot)
        self.runner.cache.move([first.slot] * len(others), [other.slot for other in others], prefix.length)
        for session in prefix.sessions:
            session.ids, session.experts = session.request.context[: prefix.length], experts
        for other in others:
            self._count_cached(other, prefix.length)

    def _count_cached(self, session: EngineSession, tokens: int) -> None:
        """Record that the first `tokens` tokens of the context were copied instead of computed."""
        session.request.record_cached(tokens)
        self.stats.cached_tokens += tokens

    def _feed(self, sessions: list[EngineSession]) -> Tensor:
        """Feed the tokens of each context that are not cached yet, and return the logits [n, V] after them. The
        sessions hold consecutive slots."""
        news = [s.request.context[len(s.ids) :] for s in sessions]
        logits, experts = self._forward(news, [len(s.ids) for s in sessions], sessions[0].slot)
        for session, computed in zip(sessions, experts, strict=True):
            session.add_experts(computed)
        return logits

    def _forward(
        self, news: list[list[int]], starts: list[int], first_slot: int
    ) -> tuple[Tensor, Sequence[ExpertIds | None]]:
        """Feed the token ids `news` to consecutive slots that hold `starts` tokens. Return the logits [n, V] after
        them, and for each slot the experts [tokens, layers, k] that computed them, None if they are not recorded."""
        length = max(map(len, news))
        device = self.model.device
        ids = torch.tensor([new + [0] * (length - len(new)) for new in news], device=device)
        lengths = torch.tensor([len(new) for new in news], device=device)
        width = max(starts) + length
        # Padding may reach past the longest prompt; it is masked, and later tokens overwrite it.
        self.runner.cache.reserve(len(self._rows), width)
        logits, experts = self._compute(ids, torch.tensor(starts, device=device), lengths, first_slot, width)
        if experts is None:
            return logits, [None] * len(news)
        return logits, [rows[: len(new)] for rows, new in zip(experts.cpu().numpy(), news, strict=True)]

    def _compute(self, ids: Tensor, *place: Any) -> tuple[Tensor, Tensor | None]:
        """Return the logits [n, V] of `ModelRunner.forward`, and the experts [n, t, layers, k] that computed the new
        tokens, None if they are not recorded."""
        with recorded(self._routers) as routing:
            logits = self.runner.forward(ids, *place)
        return logits, chosen_experts(routing).unflatten(0, ids.shape) if routing else None

    def _decode(self) -> None:
        """Sample one token for every decoding row."""
        batch = self._batch
        self.runner.cache.reserve(len(self._rows), batch.width)
        logits, experts = self._compute(batch.last[:, None], batch.lengths, batch.ones, 0, batch.width)
        batch.advance()
        batch.take(logits, experts)
        if batch.ended:
            self._settle(batch)
            self._regroup()

    def _regroup(self) -> None:
        """Rebuild the batch from the rows whose turn is unfinished."""
        decoding = self._arrange(self._decoding())
        self._batch = self._new_batch(decoding) if decoding else None
        self._shrink = False

    def _decoding(self) -> list[EngineSession]:
        """Write the sampled tokens to their requests, and return the rows whose turn is unfinished."""
        if self._batch is None:
            return []
        self._batch.flush(self.version)
        return [s for s in self._batch.sessions if s.request is not None]

    def _settle(self, batch: DecodeBatch) -> None:
        """Deliver the turns that ended to their callers."""
        batch.flush(self.version)
        for row, reason in batch.ended.items():
            session = batch.sessions[row]
            if session.request is not None:
                self.stats.sampled_tokens += len(session.request.token_ids)
                session.finish(reason)

    def _new_batch(self, sessions: list[EngineSession]) -> DecodeBatch:
        return DecodeBatch(sessions, self.stops, self.model.device, self.max_context_length)

    def _arrange(self, decoding: list[EngineSession], fed: Sequence[EngineSession] = ()) -> list[EngineSession]:
        """Assign the slots: first `decoding`, in an order that moves few rows; then `fed`, in the given order; then the
        other trajectories that hold a slot. Released trajectories lose their slots.

        Returns:
            `decoding` in the order of the slots. The order depends on these rows alone, not on when others were
            released.
        """
        chosen = {*decoding, *fed}
        rest = [s for s in self._rows if s not in chosen and not s.released]
        decoding = _seated(decoding, 0)
        order = [*decoding, *fed, *_seated(rest, len(chosen))]
        self.runner.cache.reserve(len(order), 1)
        moves = [(s.slot, slot) for slot, s in enumerate(order) if s.slot is not None and s.slot != slot and s.ids]
        if moves:
            self.runner.cache.move(*map(list, zip(*moves, strict=True)), length=max(len(s.ids) for s in order))
        for session in self._rows:
            session.slot = None
        for slot, session in enumerate(order):
            session.slot = slot
        self._rows = order
        return decoding


def make_runner(model: Any, fused_decode: bool, cuda_graphs: bool) -> ModelRunner:
    """Return the fastest forward pass that supports this model.

    Raises:
        UserError: no forward pass supports this model.
    """
    if not fused_decode or not fused.supports(model):
        return HfRunner(model)
    if model.device.type == "cuda":
        return GraphRunner(model) if cuda_graphs else CudaRunner(model)
    halved = model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16)
    return HalfRunner(model) if halved else fused.FusedRunner(model)


def _seated(sessions: list[EngineSession], first: int) -> list[EngineSession]:
    """Order sessions for the slots from `first` on, so that as few sessions as possible change their slot."""
    slots = range(first, first + len(sessions))
    sitting = {s.slot: s for s in sessions if s.slot in slots}
    others = (s for s in sessions if s.slot not in slots)
    return [sitting.get(slot) or next(others) for slot in slots]


def _some(names: Iterable[str]) -> str:
    """Format the first four names and the number of the others."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
