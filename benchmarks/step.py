"""Wall and CPU seconds of one RL step: generation, forward, backward and the rest, with mtrl's own parts.

The policy has random weights, every turn samples exactly `--tokens` tokens, and the environment answers with a fixed
text and with a hash of the response as reward, so that the work of a step depends only on the sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import hashlib
import json
import os
import platform
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from cost import Cost
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.derived import max_logits, sequences
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import FsdpConfig, TrainerConfig
from mtrl.distributed.world import World
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.models.renderer import ROLES, TinyRenderer
from mtrl.models.tiny import train_tokenizer
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import RolloutReport, Rollouts
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.loading import fit_attention, recompute
from mtrl.trainer.publisher import Publisher
from mtrl.trainer.setup.engine import colocated
from mtrl.trainer.setup.models import prepared
from mtrl.trainer.setup.placement import has_copy
from mtrl.trainer.update.learner import Learner, alone
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update import Updater
from mtrl.trainer.work_thread import WorkThread
from mtrl.types import Row, Sample

DTYPES = {"dtype": ("float32", "bfloat16"), "param_dtype": ("dtype", "float32", "bfloat16")}
PARTS = ("generate", "forward", "backward", "rest")
BASE_VOCABULARY = 256 + 2 + len(ROLES)
"""Number of tokens for bytes, end, padding and roles. The words of the benchmark are further tokens."""
PROMPT_FRAME = 3
"""Number of tokens of a prompt that are not its text: the user's marker, the end, and the assistant's marker."""
TOOL_FRAME = 4
"""Number of tokens between two turns that are not text: the end of the first turn, and the three of a prompt."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured step. Each field is a command-line option."""

    prompts: int = 8
    group_size: int = 8
    turns: int = 3
    tokens: int = 64
    """Number of sampled tokens per turn."""
    tool_tokens: int = 20
    """Number of context tokens between two turns, including markers."""
    prompt_tokens: int = 20
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 512
    micro_batch_tokens: int = TrainerConfig.max_tokens_per_microbatch
    dtype: str = "float32"
    """Data type of the weights."""
    param_dtype: str = "dtype"
    """Data type of forward, backward and sampling (`trainer.fsdp.param_dtype`); `dtype` is that of the weights."""
    recomputed_layers: int = 0
    """Value of `trainer.recomputed_layers`; 0: no layer is recomputed."""
    logits_per_chunk: int = 0
    """Value of `trainer.max_logits_per_chunk`; 0: the default."""
    compile: bool = False
    """Value of `trainer.compile`. The model is compiled in the warm-up step."""
    threads: int = 1
    steps: int = 5
    """Number of measured steps, after one warm-up step."""
    seed: int = 0


def now() -> Cost:
    """Return the wall clock, and the CPU time of all threads of this process."""
    return Cost(time.perf_counter(), time.process_time())


class Clock:
    """Divides the time of a step into parts. While an inner part runs, the outer part is stopped."""

    def __init__(self) -> None:
        self.parts = {name: Cost() for name in PARTS}
        self._current: str | None = None
        self._since = now()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        outer = self._current
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None) -> None:
        moment = now()
        if self._current is not None:
            self.parts[self._current] += moment - self._since
        self._current, self._since = name, moment


class TimedPolicy(Policy):
    """Policy whose forward passes belong to the part `forward`."""

    clock = Clock()

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self.clock.part("forward"):
            return super().logprobs(batch)

    def logprobs_beside(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        with self.clock.part("forward"):
            return super().logprobs_beside(batch)


@contextmanager
def timed_backward(policy: TimedPolicy) -> Iterator[None]:
    """Add the time of `loss.backward()` to the part `backward`."""
    plain = Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        with policy.clock.part("backward"):
            plain(self, *args, **kwargs)

    with mock.patch.object(Tensor, "backward", backward):
        yield


class FixedRenderer(TinyRenderer):
    """Renderer of the tiny policy without stop tokens, so that all turns have the same number of tokens."""

    def get_stop_token_ids(self) -> list[int]:
        return []

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Any,
        *,
        tools: Any = None,
    ) -> Any:
        return super().bridge_to_next_turn(previous_prompt_ids + previous_completion_ids, [], new_messages, tools=tools)


class Hashed(BaseEnvironment):
    """Answers every turn with the same text; the reward is a hash of the response, between 0 and 1."""

    def __init__(self, max_turns: int, observation: str, seed: int):
        super().__init__(max_turns)
        self.observation, self.seed = observation, seed

    def step(self, response: str, ground_truth: dict[str, Any]) -> tuple[float, str, bool]:
        self.current_turn += 1
        digest = hashlib.blake2b(f"{self.seed}/{self.current_turn}/{response}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") / 2**32, self.observation, self.current_turn >= self.max_turns


class Bench:
    """A policy with its engine, rollouts and update, assembled as in `mtrl.trainer.setup.parts`."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.words = [f"<w{i}>" for i in range(sizes.vocabulary - BASE_VOCABULARY)]
        self.tokenizer = train_tokenizer([], sizes.vocabulary, tuple(self.words))
        assert len(self.tokenizer) == sizes.vocabulary
        context = sizes.prompt_tokens + sizes.turns * (sizes.tokens + sizes.tool_tokens)
        fsdp = FsdpConfig(param_dtype=None if sizes.param_dtype == "dtype" else sizes.param_dtype)
        self.config = Config(
            seed=sizes.seed,
            algorithm=AlgorithmConfig(group_size=sizes.group_size),
            trainer=TrainerConfig(
                max_tokens_per_microbatch=sizes.micro_batch_tokens,
                gradient_checkpointing=sizes.recomputed_layers > 0,
                recomputed_layers=sizes.recomputed_layers or None,
                max_logits_per_chunk=sizes.logits_per_chunk or None,
                fsdp=fsdp,
                compile=sizes.compile,
            ),
        )
        model = make_policy(sizes, self.tokenizer, context)
        sampled = copy.deepcopy(model).to(getattr(torch, fsdp.param_dtype)) if fsdp.param_dtype else model
        fit_attention(model, self.config)
        recompute(model, self.config)
        self.policy = TimedPolicy(
            prepared(model, self.config, World()), self.tokenizer, max_logits=max_logits(self.config, "cpu")
        )
        self.engine = LocalEngine(sampled, self.tokenizer, sequences(self.config), context)
        self.pool = EnvironmentPool(self.config.environment.max_workers)
        make_environment = partial(Hashed, sizes.turns, self._text(sizes.tool_tokens - TOOL_FRAME, 0), sizes.seed)
        make_conversation = partial(Conversation, Codec(self.tokenizer, FixedRenderer(self.tokenizer)))
        limits = EpisodeLimits(sizes.turns, context, step_timeout=600.0, episode_timeout=3600.0, retries=0)
        loop = EpisodeLoop(self.engine, make_environment, make_conversation, self.pool, limits)
        self.rollouts = Rollouts(loop, sizes.seed, max_failed_share=0.0)
        self.sampling = SamplingParams(max_generate_length=sizes.tokens)
        optimizer = Optimizer(model, self.config.trainer.optimizer, sizes.steps + 1)
        learners = alone(Learner(self.config, self.policy, None, optimizer))
        self.updater = Updater(self.config, learners, Path("nonfinite_batch.jsonl"))
        sends = has_copy(self.config, World())
        sleeping = colocated(self.config, self.engine, sends)
        self.publisher = Publisher(self.engine, learners, WorkThread(False), sends, colocated=sleeping)

    async def run(self) -> list[dict[str, Any]]:
        """Run all steps, and return the measurements of all but the warm-up step."""
        with timed_backward(self.policy):
            steps = [await self._step(step) for step in range(self.sizes.steps + 1)]
        await self.engine.close()
        self.pool.close()
        return steps[1:]

    async def _step(self, step: int) -> dict[str, Any]:
        rows = self._rows(step)
        prefilled = -self._prefilled()
        clock = self.policy.clock = Clock()
        start = now()
        with clock.part("generate"):
            report = await self.rollouts.collect(f"step{step}", rows, self.sizes.group_size, self.sampling)
        with clock.part("rest"):
            samples = self._samples(report)
            async with self.publisher.asleep():
                update = self.updater.run(samples, step)
            await self.publisher.publish(step + 1)
        whole = now() - start
        tokens = self._count(report, samples) | {
            "prefilled": prefilled + self._prefilled(),
            "trained": update.report.trained_tokens,
        }
        return {
            "parts": {name: asdict(cost) for name, cost in clock.parts.items()},
            "step": asdict(whole),
            "tokens": tokens,
        }

    def _samples(self, report: RolloutReport) -> list[Sample]:
        return [
            sample
            for group in report.groups
            for sample in group_samples(group, turn_advantages([group], self.config.algorithm)[0])
        ]

    def _count(self, report: RolloutReport, samples: list[Sample]) -> dict[str, int]:
        turns = [trajectory.turns for group in report.groups for trajectory in group.trajectories]
        return {
            "episodes": len(turns),
            "prompts": sum(len(first.observation_ids) for first, *_ in turns),
            "tools": sum(len(turn.observation_ids) for _, *later in turns for turn in later),
            "sampled": sum(len(turn.action_ids) for episode in turns for turn in episode),
            "samples": len(samples),
            "forwarded": sum(len(sample.token_ids) for sample in samples),
        }

    def _prefilled(self) -> int:
        """Return the number of context tokens that the engine has computed so far, without those in its cache."""
        return self.engine.stats.prompt_tokens - self.engine.stats.cached_tokens

    def _rows(self, step: int) -> list[Row]:
        texts = [self._text(self.sizes.prompt_tokens - PROMPT_FRAME, f"{step}/{i}") for i in range(self.sizes.prompts)]
        return [
            {"id": str(i), "prompt": [{"role": "user", "content": text}], "ground_truth": {}}
            for i, text in enumerate(texts)
        ]

    def _text(self, tokens: int, name: Any) -> str:
        return "".join(random.Random(f"{self.sizes.seed}/{name}").choices(self.words, k=tokens))


def make_policy(sizes: Sizes, tokenizer: Any, context: int) -> Any:
    """Return a Qwen3 model with random weights and tied embeddings."""
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.hidden_size // sizes.heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(sizes.seed)
    return Qwen3ForCausalLM(config).to(getattr(torch, sizes.dtype)).eval()


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure all steps, and return them with the figures of the step that took the least CPU time."""
    load = [os.getloadavg()[0]]
    torch.set_num_threads(sizes.threads)
    bench = Bench(sizes)
    steps = asyncio.run(bench.run())
    best = min(steps, key=lambda step: step["step"]["cpu_s"])
    cpu, parts, tokens = best["step"]["cpu_s"], best["parts"], best["tokens"]
    training = cpu - parts["generate"]["cpu_s"]
    return {
        "settings": asdict(sizes),
        "parameters": bench.policy.parameters,
        "machine": machine(),
        "load_average": [*load, os.getloadavg()[0]],
        "best": best,
        "share": {name: part["cpu_s"] / cpu for name, part in parts.items()},
        "sampled_per_cpu_s": tokens["sampled"] / parts["generate"]["cpu_s"],
        "trained_per_cpu_s": tokens["trained"] / training,
        "peak_rss_mib": peak_rss(),
        "steps": steps,
    }


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def peak_rss() -> float:
    """Return the peak memory of this process in MiB, including its imports."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def table(result: dict[str, Any]) -> str:
    best, on = result["best"], result["machine"]
    tokens, sizes = best["tokens"], result["settings"]
    before, after = result["load_average"]
    rows = [*((name, best["parts"][name], result["share"][name]) for name in PARTS), ("step", best["step"], 1.0)]
    facts = {
        "sampled tokens per CPU-second of generation": f"{result['sampled_per_cpu_s']:,.0f}",
        "trained tokens per CPU-second of training": f"{result['trained_per_cpu_s']:,.0f}",
        "peak RSS, MiB": f"{result['peak_rss_mib']:,.0f}",
        "tokens sampled": f"{tokens['sampled']:,}",
        "tokens trained": f"{tokens['trained']:,}",
        "tokens prefilled": f"{tokens['prefilled']:,}",
        "tokens of the training samples": f"{tokens['forwarded']:,}",
        "CPU s of every step": " ".join(f"{step['step']['cpu_s']:.2f}" for step in result["steps"]),
    }
    width = max(map(len, facts))
    computed = "" if sizes["param_dtype"] == "dtype" else f" computed in {sizes['param_dtype']}"
    computed += ", compiled" if sizes["compile"] else ""
    return "\n".join(
        [
            f"{result['parameters'] / 1e6:.2f} M parameters, {sizes['dtype']}{computed}; {sizes['prompts']} prompts x "
            f"{sizes['group_size']} completions, {sizes['turns']} turns x {sizes['tokens']} tokens, "
            f"micro-batches of {sizes['micro_batch_tokens']} tokens",
            f"{on['cpu']}, {on['cores']} cores, {on['threads']} used, load average {before:.1f} to {after:.1f}; "
            f"torch {on['torch']}, transformers {on['transformers']}, Python {on['python']}",
            f"the step with the least CPU time of {sizes['steps']} steps, after one warm-up",
            "",
            f"{'part':<10}{'wall s':>10}{'CPU s':>10}{'share':>9}",
            *(f"{name:<10}{cost['wall_s']:>10.3f}{cost['cpu_s']:>10.3f}{share:>9.1%}" for name, cost, share in rows),
            "",
            *(f"{name:<{width}}  {value}" for name, value in facts.items()),
        ]
    )


def parse(words: Sequence[str] | None = None) -> tuple[Sizes, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Sizes()).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true")
            continue
        choices = DTYPES.get(name)
        parser.add_argument(option, type=type(default), default=default, choices=choices, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write all results to this JSON file")
    values = vars(parser.parse_args(words))
    path = values.pop("json")
    sizes = Sizes(**values)
    least = {
        "vocabulary": BASE_VOCABULARY + 1,
        "prompt_tokens": PROMPT_FRAME,
        "tool_tokens": TOOL_FRAME,
        "group_size": 2,
        "seed": 0,
        "recomputed_layers": 0,
        "logits_per_chunk": 0,
        "compile": 0,
    }
    for name, value in values.items():
        if isinstance(value, int) and value < least.get(name, 1):
            parser.error(f"--{name.replace('_', '-')} must be at least {least.get(name, 1)}")
    return sizes, path


def main() -> None:
    sizes, path = parse()
    result = measure(sizes)
    print(table(result))
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
