"""RL steps, or a whole lesson, with TRL. `trl.py` starts this script with the interpreter of TRL's environment.

    python -I benchmarks/trl_step.py jobs.json results.json

With -I, `import trl` imports TRL and not the benchmark beside this file. The jobs run one after the other. Nothing of
mtrl is imported.

TRL takes conversations of several turns from a `rollout_func`. This one calls `GRPOTrainer._generate_single_turn`, as
TRL's own loop over tool calls does, and appends the token ids of the environment. It does less work than TRL's loop,
which renders the chat template and parses every turn. No token ends a turn, since the model lacks the end token of the
tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

PARTS = ("generate", "forward", "backward")


@dataclass(frozen=True)
class Way:
    """Settings of TRL: `DTYPE/COMPLETIONS`, to which `/kept` or `/compiled` may be appended."""

    dtype: str
    """float32, or bfloat16 (`bf16=True`: autocast over float32 weights)."""
    micro_batch: int
    """Number of completions per forward and backward pass."""
    keeps_cache: bool = False
    """Each turn continues with the keys and values of the turn before. TRL has no setting for this: the `rollout_func`
    calls `generate` itself, which works only while all contexts have the same length."""
    compiled: bool = False
    """Value of `torch_compile`. The model is compiled in the step that is not measured."""

    @classmethod
    def read(cls, text: str) -> Way:
        """
        Raises:
            ValueError: the text has another form.
        """
        found = re.fullmatch(r"(float32|bfloat16)/([1-9]\d*)(/kept|/compiled)?", text)
        if not found:
            raise ValueError(f"{text!r} is not DTYPE/COMPLETIONS, such as bfloat16/16, perhaps with /kept or /compiled")
        return cls(found[1], int(found[2]), found[3] == "/kept", found[3] == "/compiled")

    def __str__(self) -> str:
        return f"{self.dtype}/{self.micro_batch}" + "/kept" * self.keeps_cache + "/compiled" * self.compiled


@dataclass(frozen=True)
class Job:
    """Sizes and settings of a run of TRL. With `taught` the run is a lesson, which ends with the first step whose mean
    reward is `enough` or more."""

    policy: str
    """Folder of the model in float32 and of its tokenizer."""
    prompts: list[list[str]]
    """Texts of each step. The first step of a benchmark is not measured."""
    between: list[int]
    """Token ids between two turns."""
    group_size: int
    turns: int
    tokens: int
    """Number of sampled tokens per turn."""
    seed: int
    threads: int
    dtype: str
    micro_batch: int
    keeps_cache: bool = False
    compiled: bool = False
    lr: float = 1e-6
    taught: list[str] = field(default_factory=list)
    """Words that are rewarded."""
    enough: float = 0.95
    """Mean reward that ends a lesson."""

    def reward(self, turn: int, text: str) -> float:
        return share(self.taught, text, self.turns * self.tokens) if self.taught else hashed(self.seed, turn, text)


def hashed(seed: int, turn: int, text: str) -> float:
    """Return a hash of the text between 0 and 1."""
    digest = hashlib.blake2b(f"{seed}/{turn}/{text}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") / 2**32


def share(taught: Sequence[str], text: str, tokens: int) -> float:
    """Return the number of words of `text` that are in `taught`, divided by `tokens`."""
    counts = Counter(re.findall(r"<w\d+>", text))
    return sum(counts[word] for word in taught) / tokens


class Clock:
    """Wall and CPU seconds of a step and its parts. `rest` is the time outside of all other parts."""

    def __init__(self) -> None:
        self._begun = self._now()
        self._parts = dict.fromkeys(PARTS, (0.0, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._parts[name] = tuple(
                sum + end - begun for sum, end, begun in zip(self._parts[name], self._now(), start, strict=True)
            )

    def read(self) -> dict[str, Any]:
        whole = [end - begun for end, begun in zip(self._now(), self._begun, strict=True)]
        rest = [total - sum(part) for total, *part in zip(whole, *self._parts.values(), strict=True)]
        parts = {**self._parts, "rest": rest}
        return {
            "parts": {name: dict(zip(("wall_s", "cpu_s"), cost, strict=True)) for name, cost in parts.items()},
            "step": dict(zip(("wall_s", "cpu_s"), whole, strict=True)),
        }

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


class Rollouts:
    """The `rollout_func`: samples all conversations in one batch, and rewards them as the environments of mtrl do."""

    def __init__(self, job: Job, tokenizer: Any):
        self.job, self.tokenizer = job, tokenizer
        self.rewards: list[float] = []
        """Mean reward of each step."""
        self.tokens: dict[str, int] = {}
        """Numbers of tokens of the last step."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        job = self.job
        rendered = self.tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True)["input_ids"]
        contexts, masks, rewards = [list(ids) for ids in rendered], [[] for _ in rendered], [0.0] * len(rendered)
        generate = KeptCache(trainer) if job.keeps_cache else single_turn(trainer)
        for turn in range(job.turns):
            if turn:
                for context, mask in zip(contexts, masks, strict=True):
                    context += job.between
                    mask += [0] * len(job.between)
            sampled = generate(contexts)
            texts = self.tokenizer.batch_decode(sampled, skip_special_tokens=True)
            for i, (ids, text) in enumerate(zip(sampled, texts, strict=True)):
                contexts[i] += ids
                masks[i] += [1] * len(ids)
                rewards[i] += job.reward(turn + 1, text)
        self.rewards.append(sum(rewards) / len(rewards))
        between = (job.turns - 1) * len(job.between) * len(prompts)
        self.tokens = {
            "episodes": len(prompts),
            "prompts": sum(map(len, rendered)),
            "tools": between,
            "sampled": sum(map(sum, masks)),
        }
        completions = [context[len(ids) :] for context, ids in zip(contexts, rendered, strict=True)]
        return {
            "prompt_ids": rendered,
            "completion_ids": completions,
            "env_mask": masks,
            "logprobs": None,
            "episode_rewards": rewards,
        }


def single_turn(trainer: Any) -> Any:
    """Return TRL's own function for one turn, which prefills the whole context in every turn."""
    return lambda contexts: trainer._generate_single_turn(contexts, None, {}, trainer.num_generations)[0]


class KeptCache:
    """Samples a turn as `_generate_single_turn` does, but continues with the keys and values of the turn before."""

    def __init__(self, trainer: Any):
        self.trainer, self.cache = trainer, None

    def __call__(self, contexts: list[list[int]]) -> list[list[int]]:
        import torch
        from trl.models import unwrap_model_for_generation

        trainer, ids = self.trainer, torch.tensor(contexts)
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
        )
        with unwrapped as model, torch.no_grad():
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=trainer.generation_config,
                past_key_values=self.cache,
                return_dict_in_generate=True,
            )
        self.cache = found.past_key_values
        return found.sequences[:, ids.size(1) :].tolist()


def make_trainer(job: Job, folder: str) -> tuple[Any, Rollouts, list[dict[str, Any]]]:
    """Return TRL's trainer, its `rollout_func`, and the list to which its steps are appended."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[dict[str, Any]] = []

    class Timed(GRPOTrainer):
        """Trainer that measures the parts of a step."""

        clock = Clock()
        trained = 0

        def _generate(self, prompts: list[Any]) -> Any:
            with self.clock.part("generate"):
                return super()._generate(prompts)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            with self.clock.part("forward"):
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            self.trained += int((inputs["completion_mask"] * inputs["tool_mask"]).sum())
            return super()._compute_loss(model, inputs)

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            trainer.clock, trainer.trained = Clock(), 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append({**trainer.clock.read(), "tokens": {**rollouts.tokens, "trained": trainer.trained}})
            control.should_training_stop |= bool(job.taught) and rollouts.rewards[-1] >= job.enough

    at_once = len(job.prompts[0]) * job.group_size
    tokenizer = AutoTokenizer.from_pretrained(job.policy)
    model = AutoModelForCausalLM.from_pretrained(job.policy, dtype="float32")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    rollouts = Rollouts(job, tokenizer)
    rows = [{"prompt": [{"role": "user", "content": text}]} for texts in job.prompts for text in texts]
    trainer = Timed(
        model=model,
        reward_funcs=lambda episode_rewards, **_: episode_rewards,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=job.dtype == "bfloat16",
            torch_compile=job.compiled,
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=at_once // job.micro_batch,
            num_generations=job.group_size,
            max_completion_length=job.turns * job.tokens + (job.turns - 1) * len(job.between),
            generation_kwargs={"max_new_tokens": job.tokens},
            shuffle_dataset=False,
            max_steps=len(job.prompts),
            gradient_checkpointing=False,
            learning_rate=job.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            seed=job.seed,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[Steps()],
    )
    return trainer, rollouts, steps


@contextmanager
def timed_backward(trainer: Any) -> Iterator[None]:
    """Add the time of `loss.backward()` to the part `backward`."""
    from torch import Tensor

    plain = Tensor.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        with trainer.clock.part("backward"):
            plain(self, *args, **kwargs)

    with mock.patch.object(Tensor, "backward", backward):
        yield


def run(job: Job, folder: str) -> dict[str, Any]:
    """Run a job, and return results in the form of `step.py`, with the mean reward of each step."""
    import torch

    load = [os.getloadavg()[0]]
    torch.set_num_threads(job.threads)
    trainer, rollouts, steps = make_trainer(job, folder)
    with timed_backward(trainer):
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "job": asdict(job) | {"prompts": None},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "machine": machine(job.threads),
        "load_average": [*load, os.getloadavg()[0]],
        "peak_rss_mib": peak / (2**20 if sys.platform == "darwin" else 2**10),
        "rewards": rollouts.rewards,
        "steps": steps if job.taught else steps[1:],
    }


def machine(threads: int) -> dict[str, Any]:
    import torch
    import transformers
    import trl

    return {
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }


def main() -> None:
    jobs, results = map(Path, sys.argv[1:])
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    found = [run(Job(**job), str(results.parent / "trl")) for job in json.loads(jobs.read_text(encoding="utf-8"))]
    results.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
