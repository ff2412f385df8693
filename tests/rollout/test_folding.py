"""Folds of a long context: the tokens of the samples, the record of the episode, and what its readers see."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.config.rollout_schema import ContextConfig
from mtrl.config.schema import GeneratorConfig, RewardConfig, SamplingConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.folding import FOLDED, REQUEST, KeepLast, Summarise, fold_of, folded
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import Group, StopReason, to_json, trajectory_from_dict
from tests.rollout.folded import ROW, play

PROMPT = "<|user|>Q<|end|><|assistant|>"
ASKED = f"<|user|>{REQUEST['content']}<|end|><|assistant|>"
REMOVED = f"<|user|>{FOLDED}<|end|><|assistant|>"


def heard(response):
    return f"<|user|>heard {response}, and some more words<|end|><|assistant|>"


def layouts(codec, trajectory):
    """Return the pieces `(text, trained)` of each sample."""
    found = []
    for sample in trajectory_samples(trajectory, [1.0] * len(trajectory.turns)):
        pieces = []
        for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True):
            if not pieces or pieces[-1][1] != trained:
                pieces.append(([], trained))
            pieces[-1][0].append(token)
        found.append([(codec.tokenizer.decode(tokens), trained) for tokens, trained in pieces])
    return found


def test_layout_of_kept_observations(tiny_codec):
    """The third turn is the first with more than one observation before it."""
    trajectory = play(tiny_codec, KeepLast(1, observations=1)).trajectory
    assert layouts(tiny_codec, trajectory) == [
        [(PROMPT, False), ("a<|end|>", True), (heard("a"), False), ("b<|end|>", True)],
        [(f"{PROMPT}a<|end|>{REMOVED}b<|end|>{heard('b')}", False), ("c<|end|>", True)],
    ]
    assert [turn.break_reason for turn in trajectory.turns] == [None, None, "fold"]
    assert trajectory.messages == play(tiny_codec, None).trajectory.messages, "the record has all observations"


def test_layout_of_summaries(tiny_codec):
    trajectory = play(tiny_codec, Summarise(1)).trajectory
    assert layouts(tiny_codec, trajectory) == [
        [(PROMPT, False), ("a<|end|>", True), (ASKED, False), ("S1<|end|>", True)],
        [(f"{PROMPT}S1<|end|>{heard('a')}", False), ("b<|end|>", True), (ASKED, False), ("S2<|end|>", True)],
        [(f"{PROMPT}S2<|end|>{heard('b')}", False), ("c<|end|>", True)],
    ]
    assert [turn.break_reason for turn in trajectory.turns] == [None, None, "fold", None, "fold"]
    assert [turn.is_summary for turn in trajectory.turns] == [False, True, False, True, False]
    assert trajectory.stop_reason == StopReason.MAX_TURNS, "summaries do not count as turns of the budget"
    assert trajectory_from_dict(json.loads(to_json(trajectory))) == trajectory
    whole = play(tiny_codec, None).trajectory
    assert trajectory.without_summaries().messages == whole.messages and whole.without_summaries() is whole


@settings(max_examples=25)
@given(
    st.integers(1, 300),
    st.sampled_from([1, 2, None]),
    st.integers(1, 6),
    st.sampled_from([100, 250, 2000]),
)
def test_every_token_is_trained_once_in_the_context_it_was_sampled_in(tiny_codec, threshold, kept, turns, limit):
    """The tokens before each turn in its sample are the prompt that the engine received."""
    fold = KeepLast(threshold, kept) if kept else Summarise(threshold)
    played = play(tiny_codec, fold, turns, max_context_length=limit)
    trajectory = played.trajectory
    assert trajectory.error is None and trajectory.stop_reason in (StopReason.MAX_TURNS, StopReason.CONTEXT_LIMIT)
    found = {}
    for sample in trajectory_samples(trajectory, [1.0] * len(trajectory.turns)):
        for turn in dict.fromkeys(index for index in sample.turns if index >= 0):
            assert turn not in found
            ids = [token for token, index in zip(sample.token_ids, sample.turns, strict=True) if index == turn]
            found[turn] = sample.token_ids[: sample.turns.index(turn)], ids
    assert [found[turn] for turn in range(len(trajectory.turns))] == [call[:2] for call in played.calls]
    assert trajectory.contexts == [len(prompt) for prompt, _, _ in played.calls]
    assert len({seed for *_, seed in played.calls}) == len(played.calls), "each turn has a random stream of its own"


def test_sampled_ids_stay_in_a_folded_context(tiny_codec, generation):
    """The ids of the turn are not those that its text would be encoded to."""
    tokenizer = tiny_codec.tokenizer
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in "heard"] + list(tiny_codec.stop_token_ids[:1])
    assert tokenizer.decode(odd) == "heard<|end|>" and tiny_codec.encode("heard") != odd[:-1]
    conversation = Conversation(tiny_codec, ROW["prompt"])
    for text in ("an observation that is long enough", "the last observation"):
        conversation.add_action(generation(odd))
        conversation.add_observation([{"role": "user", "content": text}])
    asyncio.run(KeepLast(1, 1).apply(conversation, None))
    old, last = ([{"role": "user", "content": text}] for text in (FOLDED, "the last observation"))
    first = [*tiny_codec.render(ROW["prompt"]), *odd, *tiny_codec.render(old)]
    assert conversation.prompt_ids == [*first, *odd, *tiny_codec.render(last)]


def test_a_fold_without_effect_is_no_break(tiny_codec, generation):
    conversation = Conversation(tiny_codec, ROW["prompt"])
    for _ in range(3):
        conversation.add_action(generation(tiny_codec.encode("a")))
        conversation.add_observation([{"role": "user", "content": "short"}])
        asyncio.run(KeepLast(1, 1).apply(conversation, None))
    assert conversation.add_action(generation(tiny_codec.encode("a"))).break_reason is None


def test_messages_keep_everything_but_their_content():
    call = {"role": "tool", "tool_call_id": "call_0_0", "name": "look", "content": "x" * 100}
    parts = {"role": "user", "content": [{"type": "text", "text": "x" * 100}]}
    short = {"role": "user", "content": None}
    assert folded([call, parts, short]) == [call | {"content": FOLDED}, {"role": "user", "content": FOLDED}, short]


def test_rewards_belong_to_turns_that_the_environment_received(tiny_codec):
    composer = RewardComposer(RewardConfig(components={"environment": 1.0, "turn_penalty": {"weight": 1.0}}))
    trajectory = play(tiny_codec, Summarise(1)).trajectory
    composer.apply(Group("g", ROW, [trajectory]))
    assert trajectory.rewards == [1.0, 0.0, 0.0, 0.0, 0.5], "the last turn is paid 1.5, and the last two cost 1 each"
    assert not any(turn.components for turn in trajectory.turns if turn.is_summary)


def test_a_context_that_is_full_in_spite_of_a_fold_ends_the_episode(tiny_codec):
    """Either the request for a summary does not fit, or the observation after the summary does not."""
    length = len(tiny_codec.render([*ROW["prompt"], REQUEST]))
    for more, limit, expected in ((1, length, [1.5]), (40, length + 10, [1.5, 0.0])):
        trajectory = play(tiny_codec, Summarise(1), max_context_length=limit, more=more).trajectory
        assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.rewards == expected
        assert [turn.is_summary for turn in trajectory.turns] == [False, True][: len(expected)]


def generator(fold, context=None, **settings):
    return GeneratorConfig(
        context=ContextConfig(fold, **settings),
        sampling_params=SamplingConfig(max_generate_length=100),
        **context or {},
    )


def test_the_fold_of_a_configuration():
    assert fold_of(generator("none", threshold=9999), 10) is None
    assert fold_of(generator("keep_last", keep_observations=2), 1000) == KeepLast(800, 2)
    assert fold_of(generator("summarise"), 300) == Summarise(150), "at least half of the context"
    assert fold_of(generator("summarise", threshold=20), 300) == Summarise(20)
    with pytest.raises(UserError, match=r"generator.context.threshold=300 is not below the 300 tokens .*lower it"):
        fold_of(generator("summarise", threshold=300), 300)
    single = {"use_conversation_multi_turn": False}
    with pytest.raises(UserError, match=r"generator.context.fold=keep_last needs .*use_conversation_multi_turn=true"):
        fold_of(generator("keep_last", single), 300)
