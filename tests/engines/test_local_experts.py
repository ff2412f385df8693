"""The experts that the local engine records are those of a plain forward pass, however the engine batches tokens."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.models.experts import chosen_experts, recorded, routers_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 300, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 8, "moe_intermediate_size": 16}
INSTRUCTIONS = list(range(100, 180))
"""A prefix that the engine computes once for all prompts, since it is long enough."""
PROMPTS = [[*INSTRUCTIONS, *own] for own in ([7, 8, 9], [7, 8, 9], [4])] + [[5, 6], [250, 251, 252, 253]]
"""The first two are a group, which the engine computes once."""


def mixture(seed=0):
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, initializer_range=0.3)).eval()


@torch.no_grad()
def experts_of(model, tokens):
    """Return the experts of all tokens but the last, by one pass over them."""
    with recorded(routers_of(model)) as routing:
        model(input_ids=torch.tensor([tokens[:-1]]))
    return chosen_experts(routing).numpy()


def engine_of(model, **settings):
    return LocalEngine(model, None, max_context_length=300, record_experts=True, **settings)


def run(coroutine):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def play(engine, name, prompt, turns=3):
    """Return context and generation of each turn; the third turn replaces the observation before the second turn."""
    found, context = [], list(prompt)
    for turn in range(turns):
        sampling = SamplingParams(max_generate_length=3 + len(prompt) % 4 + turn, seed=len(prompt))
        found.append((context, await engine.generate(name, context, sampling)))
        before, generation = found[0 if turn == 1 else -1]
        context = before + generation.token_ids + [40 + turn, 50, 60]
    engine.release(name)
    return found


@pytest.mark.parametrize("deterministic", [True, False])
def test_all_tokens_but_the_last_have_the_experts_of_a_plain_pass(deterministic):
    """The prompts have copies and a shared prefix, rows are padded and move between slots, and later turns are cached
    in part, also after a break."""
    model = mixture()
    engine = engine_of(model, max_num_seqs=4, deterministic=deterministic)

    async def go():
        names = [str(number) for number in range(len(PROMPTS))]
        for name in names:
            engine.open(name)
        return await asyncio.gather(*(play(engine, *pair) for pair in zip(names, PROMPTS, strict=True)))

    for turns in run(go()):
        assert len(turns) == 3
        for context, generation in turns:
            expected = experts_of(model, context + generation.token_ids)
            assert generation.experts.dtype == np.int8
            assert generation.experts.tolist() == expected.tolist()
    assert engine.stats.cached_tokens > 3 * len(INSTRUCTIONS)


def test_after_new_weights_tokens_keep_the_experts_with_which_the_next_token_was_sampled():
    old, new, model = mixture(0), mixture(1), mixture(0)
    engine = engine_of(model, deterministic=False)
    prompt = [1, 2, 3, 4, 5]

    async def go():
        turn = asyncio.ensure_future(engine.generate("a", prompt, SamplingParams(max_generate_length=30)))
        for version, weights in ((1, new), (2, old)):
            for _ in range(9):
                await asyncio.sleep(0)
            await engine.load_weights(weights.state_dict(), version)
        first = await turn
        context = prompt + first.token_ids + [9]
        return first, context, await engine.generate("a", context, SamplingParams(max_generate_length=4))

    first, context, second = run(go())
    assert [version for version, _ in first.version_spans] == [0, 1, 2]
    tokens, row = prompt + first.token_ids, 0
    by_weights = [experts_of(model, tokens) for model in (old, new)]
    assert (by_weights[0] != by_weights[1]).any(), "or the weights choose the same experts"
    for version, count in first.version_spans:
        end = row + count + (len(prompt) - 1 if version == 0 else 0)
        assert first.experts[row:end].tolist() == by_weights[version % 2][row:end].tolist()
        row = end
    assert row == len(first.experts) == len(tokens) - 1
    own = experts_of(old, context + second.token_ids)
    assert second.experts[len(tokens) - 1 :].tolist() == own[len(tokens) - 1 :].tolist()


def test_an_aborted_turn_and_an_engine_that_does_not_record():
    engine = engine_of(mixture(), deterministic=False)

    async def go():
        turn = asyncio.ensure_future(engine.generate("a", [1, 2, 3], SamplingParams(max_generate_length=50)))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.release("a")
        return await turn

    aborted = run(go())
    assert len(aborted.experts) == 2 + len(aborted.token_ids) > 4
    plain = LocalEngine(mixture(), None, max_context_length=300)
    assert run(plain.generate("a", [1, 2, 3], SamplingParams(max_generate_length=3))).experts is None


def test_recording_changes_no_token(make_tiny_model):
    sampling = SamplingParams(max_generate_length=8, seed=3)
    engines = [LocalEngine(mixture(), None, max_context_length=300), engine_of(mixture())]
    one, other = [run(engine.generate("a", PROMPTS[2], sampling)) for engine in engines]
    assert one == other and other.experts is not None
    dense = engine_of(make_tiny_model())
    assert run(dense.generate("a", [1, 2, 3], sampling)).experts is None
