"""The local engine with images: its log-probs are those of plain Transformers, and images are part of the context."""

import asyncio
from itertools import pairwise

import pytest
import torch

from mtrl.engines.base import ImagePrompt, SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.vision import VisionEngine
from mtrl.models.preparation import checkpoint_gradients
from mtrl.rollout.image_conversation import ImageConversation
from mtrl.types import images_in
from mtrl.utils.images import PNG
from tests.vision_models import FAMILIES, codec, conversations, picture, plain_logits, shown, tokenizer


def make(model, **settings):
    return VisionEngine(model, tokenizer(), max_context_length=400, **settings)


def play(engine, observations, seed=0, length=6, between=lambda turn: None):
    """Sample the turns of each trajectory at the same time; return their conversations. `between` is awaited with the
    index of each turn but the first, before it is sampled."""

    async def one(index, mine):
        conversation = ImageConversation(codec(), mine[0])
        for turn, messages in enumerate(mine):
            if turn:
                conversation.add_observation(messages)
                await (between(turn) or asyncio.sleep(0))
            sampling = SamplingParams(length, seed=100 * seed + 10 * index + turn)
            conversation.add_action(await engine.generate(str(index), conversation.prompt, sampling))
        engine.release(str(index))
        return conversation

    async def all_of_them():
        for index in range(len(observations)):
            engine.open(str(index))
        found = await asyncio.gather(*(one(index, mine) for index, mine in enumerate(observations)))
        await engine.close()
        return found

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def check(model, conversation):
    """Compare the log-probs of all turns with those of the whole sequence in one pass of plain Transformers."""
    ids, placeholders, images = [], [], []
    for turn in conversation.turns:
        assert turn.break_reason is None
        is_image = [token == codec().processor.placeholder for token in turn.observation_ids]
        placeholders += [*is_image, *[False] * len(turn.action_ids)]
        ids += turn.observation_ids + turn.action_ids
        images += images_in(turn.observation)
    with torch.no_grad():
        logprobs = plain_logits(model, ids, placeholders, images)[1].log_softmax(-1)
    end = 0
    for turn in conversation.turns:
        start = end + len(turn.observation_ids)
        end = start + len(turn.action_ids)
        expected = logprobs[start - 1 : end - 1].gather(1, torch.tensor(turn.action_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.action_logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_one_pass_over_the_conversation(family):
    model = FAMILIES[family]()
    for conversation in play(make(model, max_num_seqs=3), conversations()):
        check(model, conversation)


def test_a_model_that_recomputes_its_layers_is_sampled_alike():
    """In training mode the layers ignore the cache, so that the engine sets them to evaluation mode."""
    model = FAMILIES["qwen3_vl"]()
    checkpoint_gradients(model)
    for conversation in play(make(model), conversations()[:2]):
        check(model, conversation)


def test_the_policy_may_sample_placeholders():
    """The placeholder's row of the head, which is also its embedding, points where the hidden states point."""
    model, placeholder = FAMILIES["qwen3_vl"](), codec().processor.placeholder
    states = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0][0].mean(0)))
    with torch.no_grad():
        model(input_ids=torch.arange(20, 60)[None])
        handle.remove()
        model.lm_head.weight[placeholder] = 6 * states[0] / states[0].dot(states[0])
    found = play(make(model), conversations(), length=40)
    assert sum(turn.action_ids.count(placeholder) for each in found for turn in each.turns) > 10
    for conversation in found:
        check(model, conversation)


def test_equal_ids_with_other_images_share_no_cache():
    """Three trajectories have the same token ids. The first two show the same image, and the third shows another."""
    model, long = FAMILIES["qwen3_vl"](), picture(1, 64, 128)
    observations = [[[shown(image)]] for image in (long, long, picture(2, 64, 128))]
    engine = make(model)
    found = play(engine, observations)
    assert found[0].prompt_ids == found[2].prompt_ids and len(found[0].prompt_ids) > 128
    for conversation in found:
        check(model, conversation)
    prompt = len(found[0].prompt_ids)
    assert engine.stats.prompt_tokens == 3 * prompt
    assert prompt - 1 <= engine.stats.cached_tokens < prompt  # of the second trajectory alone


def test_an_image_is_encoded_once_for_each_trajectory():
    model = FAMILIES["qwen3_vl"]()
    encoded = []
    model.model.visual.register_forward_pre_hook(lambda _, args: encoded.append(len(args[0])))
    observations = [[[shown(picture(0))], [shown("go")], [shown(picture(0), picture(1))]]]
    play(make(model), observations)
    assert encoded == [24, 48]  # patches: the first turn shows one image of 4 x 6, the third turn two


def test_tokens_do_not_depend_on_the_batch():
    model = FAMILIES["qwen3_vl"]()
    together, one_by_one = (play(make(model, max_num_seqs=slots), conversations(), seed=3) for slots in (8, 1))
    for first, second in zip(together, one_by_one, strict=True):
        assert [turn.action_ids for turn in first.turns] == [turn.action_ids for turn in second.turns]


def test_new_weights_of_the_tower_count_in_the_next_turn():
    """Images of earlier turns are encoded again after an update, since their keys and values are of older weights."""
    model = FAMILIES["qwen3_vl"]()
    engine = make(model, deterministic=False)

    async def update(turn):
        with torch.no_grad():
            for parameter in model.model.visual.parameters():
                parameter += 0.02
        await engine.load_weights(None, turn)

    (conversation,) = play(engine, [[[shown(picture(0))], [shown("go")]]], between=update)
    assert [turn.version_spans[0][0] for turn in conversation.turns] == [0, 1]
    first, second = conversation.turns
    expected = FAMILIES["qwen3_vl"]()
    with pytest.raises(AssertionError):
        check(expected, conversation)  # the second turn is of the new weights
    ids = [*first.observation_ids, *first.action_ids, *second.observation_ids, *second.action_ids]
    known = len(ids) - len(second.action_ids)
    places = [
        index < len(first.observation_ids) and token == codec().processor.placeholder for index, token in enumerate(ids)
    ]
    with torch.no_grad():
        logits = plain_logits(model, ids, places, images_in(first.observation))[1]
    logprobs = logits[known - 1 : -1].log_softmax(-1).gather(1, torch.tensor(second.action_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(second.action_logprobs), logprobs, atol=1e-5, rtol=0)


def test_an_engine_of_a_text_conversation_is_the_same_with_and_without_vision():
    """Text alone takes the same path as in the engine of other models, up to rounding."""
    model = FAMILIES["qwen3_vl"]()
    prompt, sampling = [3, 40, 41, 42, 43], SamplingParams(20, seed=7)

    async def sample(engine):
        generation = await engine.generate("a", prompt, sampling)
        await engine.close()
        return generation

    first, second = (
        asyncio.run(sample(kind(model, tokenizer(), max_context_length=64))) for kind in (VisionEngine, LocalEngine)
    )
    assert first.token_ids == second.token_ids
    torch.testing.assert_close(torch.tensor(first.logprobs), torch.tensor(second.logprobs), atol=1e-5, rtol=0)


def test_places_of_a_prompt_are_its_placeholders():
    conversation = ImageConversation(codec(), [shown(picture(0), "now", picture(1, 8, 8))])
    prompt = conversation.prompt
    assert isinstance(prompt, ImagePrompt)
    for (start, _), count in zip(prompt.images, (6, 1), strict=True):
        run = prompt.ids[start - 1 : start + count + 1]
        assert run[0] != run[1] == run[count] != run[-1] and len(set(run[1:-1])) == 1
    assert all(first < second for (first, _), (second, _) in pairwise(prompt.images))


def test_an_image_whose_pixels_are_damaged_fails_its_turn_alone():
    """The number of its tokens is known from its header."""
    encoded = picture(3, 64, 64)["image"].removeprefix(PNG)
    damaged = {"type": "image", "image": PNG + encoded[: len(encoded) // 8 * 4]}
    conversation, other = (ImageConversation(codec(), [shown(part)]) for part in (damaged, picture(4)))
    engine = make(FAMILIES["qwen3_vl"]())

    async def both():
        turns = [
            engine.generate(name, each.prompt, SamplingParams(3))
            for name, each in (("damaged", conversation), ("whole", other))
        ]
        for name in ("damaged", "whole"):
            engine.open(name)
        failed = await asyncio.gather(turns[0], return_exceptions=True)
        engine.release("damaged")
        sampled = await turns[1]
        await engine.close()
        return failed[0], sampled

    error, generation = asyncio.run(asyncio.wait_for(both(), 60))
    assert isinstance(error, ValueError) and "cannot be read" in str(error)
    assert 1 <= len(generation.token_ids) <= 3
