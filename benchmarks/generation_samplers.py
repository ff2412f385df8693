"""Samplers of trajectories of given sizes: mtrl's engines, called by their protocol, and Hugging Face `generate`."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from engines import family
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from mtrl.config.model_schema import ModelConfig
from mtrl.config.schema import Config, GeneratorConfig
from mtrl.distributed.world import World
from mtrl.engines.base import Engine, SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.rollout.rollouts import all_or_none, stream_seed
from mtrl.trainer.setup.servers import server_engine, server_settings

SERVERS = ("vllm", "sglang")
HF = ("hf", "hf_kept")
USUAL = ("local", *HF, *SERVERS)
"""Engines that are compared unless others are named."""
ENGINES = (*USUAL, "llamacpp")
SPARE = 1.25
"""Cache of a server, as a multiple of the keys and values of all trajectories."""
LEAST_ROOM = 8192
"""Least number of tokens for which a server has room."""


@dataclass(frozen=True)
class Wave:
    """Prompts and observations of trajectories that begin together, as token ids."""

    number: int
    prompts: list[list[int]]
    observations: list[list[list[int]]]
    """One list for each turn but the first, with one observation for each trajectory."""
    tokens: int
    """Number of sampled tokens per turn."""

    @classmethod
    def make(
        cls, number: int, trajectories: int, turns: int, tokens: int, prompt: int, observed: int, vocabulary: int
    ) -> Wave:
        ids = random.Random(number)

        def texts(length: int) -> list[list[int]]:
            return [ids.choices(range(vocabulary), k=length) for _ in range(trajectories)]

        return cls(number, texts(prompt), [texts(observed) for _ in range(turns - 1)], tokens)

    @property
    def sampled(self) -> int:
        return len(self.prompts) * (len(self.observations) + 1) * self.tokens


class Sampler(Protocol):
    async def sample(self, wave: Wave) -> None:
        """Sample all turns of all trajectories.

        Raises:
            SystemExit: a turn has another number of tokens.
        """

    async def close(self) -> None: ...


class EngineSampler:
    """Samples every trajectory by itself: it requests its next turn as soon as it has the last one, as episodes do."""

    def __init__(self, engine: Engine):
        self.engine = engine

    async def sample(self, wave: Wave) -> None:
        names = [f"{wave.number}/{i}" for i in range(len(wave.prompts))]
        for name in names:
            self.engine.open(name)
        await all_or_none(self._trajectory(wave, i, name) for i, name in enumerate(names))

    async def _trajectory(self, wave: Wave, index: int, name: str) -> None:
        sampling = SamplingParams(max_generate_length=wave.tokens, seed=stream_seed(0, str(wave.number), index))
        context = wave.prompts[index]
        for turn in range(len(wave.observations) + 1):
            if turn:
                context = context + wave.observations[turn - 1][index]
            generation = await self.engine.generate(name, context, sampling)
            check(len(generation.token_ids), wave.tokens)
            context = context + generation.token_ids
        self.engine.release(name)

    async def close(self) -> None:
        await self.engine.close()


class HfSampler:
    """Calls `generate` with all trajectories in one batch, turn by turn. All contexts have the same length, so that
    nothing is padded. It computes no log-probs of the sampled tokens, which the engines return.
    """

    def __init__(self, model: Any, keeps_cache: bool):
        """
        Args:
            keeps_cache: pass keys and values of one turn to the next; otherwise every turn computes its history again.
        """
        model.generation_config.eos_token_id = None  # nothing ends a turn
        self.model, self.keeps_cache = model, keeps_cache

    @torch.inference_mode()
    async def sample(self, wave: Wave) -> None:
        config = GenerationConfig(
            max_new_tokens=wave.tokens, do_sample=True, top_k=0, pad_token_id=0, return_dict_in_generate=True
        )
        contexts, cache = torch.tensor(wave.prompts), None
        for turn in range(len(wave.observations) + 1):
            if turn:
                contexts = torch.cat((contexts, torch.tensor(wave.observations[turn - 1])), 1)
            found = self.model.generate(
                contexts, attention_mask=torch.ones_like(contexts), generation_config=config, past_key_values=cache
            )
            check(found.sequences.shape[1] - contexts.shape[1], wave.tokens)
            contexts, cache = found.sequences, found.past_key_values if self.keeps_cache else None

    async def close(self) -> None:
        pass


def check(sampled: int, wanted: int) -> None:
    if sampled != wanted:
        raise SystemExit(f"a turn has {sampled} tokens instead of {wanted}")


def make_sampler(engine: str, folder: Path, trajectories: int, context: int, dtype: str, threads: int) -> Sampler:
    """
    Args:
        folder: folder of the policy.
        context: number of tokens of a whole conversation.

    Raises:
        UserError: the engine is not installed, or does not start.
    """
    if engine in SERVERS:
        return EngineSampler(make_server(engine, folder, trajectories, context, dtype, threads))
    disable_progress_bar()
    if engine == "llamacpp":
        from generation_llamacpp import LlamaCppSampler

        return LlamaCppSampler(folder, trajectories, context, threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if engine in HF:
        return HfSampler(model, engine == "hf_kept")
    return EngineSampler(LocalEngine(model, AutoTokenizer.from_pretrained(folder), trajectories, context))


def make_server(engine: str, folder: Path, trajectories: int, context: int, dtype: str, threads: int) -> Engine:
    """Start one server as a run does, with room for the keys and values of all trajectories."""
    model = AutoConfig.from_pretrained(folder)
    room = max(LEAST_ROOM, int(SPARE * trajectories * context))
    config = Config(
        model=ModelConfig(name="hf", path=str(folder), dtype=dtype),
        generator=GeneratorConfig(backend=engine, max_num_seqs=trajectories),
    )
    settings = server_settings(config)
    settings.env = {"OMP_NUM_THREADS": str(threads)}
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * getattr(torch, dtype).itemsize
    settings.args = {"kv_cache_memory_bytes": room * token} if engine == "vllm" else {"max_total_tokens": room}
    return server_engine(config, World(), str(folder), model, context, folder.parent)


class Meter:
    """CPU and wall seconds of this process and of its descendants since the meter was made."""

    def __init__(self) -> None:
        self._begun = self._now()

    def read(self) -> dict[str, float]:
        wall, own, below = (end - begun for end, begun in zip(self._now(), self._begun, strict=True))
        return {"wall_s": wall, "cpu_s": own + below, "server_cpu_s": below}

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), sum(map(cpu_seconds, family(os.getpid())[1:]))


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process and of its ended children (proc_pid_stat(5), fields 14-17)."""
    with suppress(OSError):  # the process has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0
