"""Jobs with which TRL does the work of `step.py`: the same weights, prompts and tokens between turns."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from step import BASE_VOCABULARY, PROMPT_FRAME, TOOL_FRAME, Sizes, make_policy
from trl_step import Job, Way

from mtrl.models.renderer import TinyRenderer
from mtrl.models.tiny import save, train_tokenizer

ENDLESS = "<|never|>"
"""End token of TRL's tokenizer. The model has no such token, so that no turn ends before its last token."""


def words_of(sizes: Sizes) -> list[str]:
    return [f"<w{i}>" for i in range(sizes.vocabulary - BASE_VOCABULARY)]


def text_of(sizes: Sizes, tokens: int, name: Any) -> str:
    return "".join(random.Random(f"{sizes.seed}/{name}").choices(words_of(sizes), k=tokens))


def make_job(sizes: Sizes, way: Way, steps: int, folder: Path, **lesson: Any) -> dict[str, Any]:
    """Write the policy to `folder`, and return a `Job` as a dict.

    Args:
        steps: number of all steps, including those that are not measured.
        lesson: fields `lr`, `taught` and `enough` of the job.
    """
    tokenizer = train_tokenizer([], sizes.vocabulary, tuple(words_of(sizes)))
    model = make_policy(sizes, tokenizer, sizes.prompt_tokens + sizes.turns * (sizes.tokens + sizes.tool_tokens))
    observation = {"role": "user", "content": text_of(sizes, sizes.tool_tokens - TOOL_FRAME, 0)}
    renderer = TinyRenderer(tokenizer)
    between = [renderer.end_id, *renderer.render_ids([observation], add_generation_prompt=True)]
    tokenizer.add_special_tokens({"eos_token": ENDLESS})
    save(model, tokenizer, folder)
    length = sizes.prompt_tokens - PROMPT_FRAME
    prompts = [[text_of(sizes, length, f"{step}/{i}") for i in range(sizes.prompts)] for step in range(steps)]
    job = Job(
        str(folder),
        prompts,
        between,
        sizes.group_size,
        sizes.turns,
        sizes.tokens,
        sizes.seed,
        sizes.threads,
        way.dtype,
        way.micro_batch,
        way.keeps_cache,
        way.compiled,
        **lesson,
    )
    return asdict(job)
