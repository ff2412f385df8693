"""Calls in trees of any kind: the parent of each call, and that every token is trained once with its own context."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_helpers import (
    USER,
    WatchedEngine,
    chat,
    replies,
    run,
    session_of,
    text,
    trained_contexts,
    trajectory_of,
    until_all_wait,
    wire,
)

from mtrl.gateway.calls import INVALID_JSON, PrefixIndex, client_message, message_key, truncate_at_stop, turns_of
from mtrl.models.renderer import make_renderer
from mtrl.rollout.conversation import Codec
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import FinishReason, to_json, trajectory_from_dict

SYSTEM = {"role": "system", "content": "be brief"}
MORE = {"role": "user", "content": "more"}


# -- trees of calls, against a model of them --------------------------------------------------------------------------


@dataclass(eq=False)
class Asked:
    """A call, as the model of the tree describes it."""

    messages: list
    parent: "Asked | None"
    """The call whose tokens its context must extend."""
    new: list
    """The messages after the parent's answer."""
    kind: str
    """Reason of the break, if the call is one."""
    key: str = ""
    """Key that is equal for equal requests."""
    answer: object = None
    ids: list = field(default_factory=list)

    def context(self, codec):
        if self.parent is None:
            return codec.render(self.messages)
        before = self.parent.context(codec) + self.parent.ids
        end = [] if before[-1] == codec.stop_token_ids[0] else [codec.stop_token_ids[0]]
        return before + end + codec.renderer.render_ids(self.new, add_generation_prompt=True)


class Program:
    """Makes the calls drawn from `data`, in waves of concurrent calls, and computes the expected results."""

    def __init__(self, data, codec):
        self.data, self.codec, self.requested, self.number = data, codec, [], 0
        self.engine = WatchedEngine(self.respond)
        self.session = session_of(self.engine, codec, calls=10_000, context=10_000, seed=2**64 - 3)

    def respond(self, number):
        ids = self.codec.encode(f"answer {number}")
        end = self.data.draw(st.sampled_from(["stop", "length"]), label="end")
        return (
            ([*ids, self.codec.stop_token_ids[0]], FinishReason.STOP) if end == "stop" else (ids, FinishReason.LENGTH)
        )

    def new(self, role="user"):
        self.number += 1
        return {"role": role, "content": f"words {self.number}"}

    def request(self):
        """Make the next request. Return an `Asked` for each answer."""
        kinds = ["fresh"] if not self.requested else ["extend", "extend", "extend", "retry", "compact", "edit", "fresh"]
        kind, n = self.data.draw(st.sampled_from(kinds), label="kind"), self.data.draw(st.integers(1, 3), label="n")
        before = self.data.draw(st.sampled_from(self.requested), label="before") if self.requested else None
        made = getattr(self, kind)(before)
        made.key = made.key or f"request {self.number}"
        others = [Asked(made.messages, made.parent, made.new, "branch", made.key) for _ in range(n - 1)]
        return [made, *others]

    def fresh(self, _):
        return Asked([SYSTEM, self.new()], None, [], "fresh")

    def extend(self, before):
        new = [self.new("tool"), self.new()][: self.data.draw(st.integers(1, 2), label="new")]
        around = self.data.draw(st.sampled_from(["", " ", "\n"]), label="around")
        answer = {**before.answer, "content": f"{around}{before.answer['content']}{around}"}
        return Asked([*before.messages, answer, *new], before, new, "branch")

    def retry(self, before):
        return Asked(before.messages, before.parent, before.new, "retry", before.key)

    def compact(self, before):
        return Asked([SYSTEM, before.messages[1], self.new()], None, [], "edited")

    def edit(self, before):
        """Return a request with an answer that was not sampled, which therefore continues the parent of `before`."""
        new = [{"role": "assistant", "content": "never sampled"}, self.new()]
        messages = [*before.messages, *new]
        if before.parent is None:
            return Asked(messages, None, [], "edited")
        return Asked(messages, before.parent, [*before.new, *new], "branch")

    async def scenario(self):
        answered = []
        for _ in range(self.data.draw(st.integers(1, 5), label="waves")):
            wave = [self.request() for _ in range(self.data.draw(st.integers(1, 3), label="beside"))]
            leaves = [self.data.draw(st.integers(0, 4), label="leaves") == 0 for _ in wave]
            self.engine.gate.clear()
            tasks = [
                asyncio.ensure_future(self.session.chat(chat(*requested[0].messages, n=len(requested))))
                for requested in wave
            ]
            for _ in range(9):
                await asyncio.sleep(0)
            assert self.engine.open_ids and set(self.engine.open_ids) == set(self.engine.asking), "none may be idle"
            for task, goes in zip(tasks, leaves, strict=True):
                if goes:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
            self.engine.gate.set()
            for requested, task, goes in zip(wave, tasks, leaves, strict=True):
                if goes:
                    continue
                for one, call in zip(requested, await task, strict=True):
                    one.answer, one.ids = wire(call), call.generation.token_ids
                    answered.append((one, call))
            assert len(self.engine.open_ids) <= 1 and not self.engine.asking
            self.requested = [one for one, _ in answered]
        return answered

    def reasons(self):
        """Return the expected break of each answered call, in the order of their starts."""
        extended, keys, reasons = set(), set(), []
        for one in self.requested:
            if one.parent is not None and one.parent not in extended:
                extended.add(one.parent)
                reasons.append(None)
            elif not reasons:
                reasons.append(None)
            elif one.kind == "branch":
                reasons.append("branch")
            else:
                reasons.append("retry" if one.key in keys else one.kind)
            keys.add(one.key)
        return reasons


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_token_is_trained_once_behind_its_own_context(tiny_codec, data):
    program = Program(data, tiny_codec)
    answered = run(program.scenario())
    trajectory = trajectory_of(program.session)
    contexts = [one.context(tiny_codec) for one in program.requested]
    assert [turn.action_ids for turn in trajectory.turns] == [one.ids for one in program.requested]
    assert [turn.break_reason for turn in trajectory.turns] == program.reasons()
    assert trajectory.contexts == [len(context) for context in contexts]
    assert trajectory_from_dict(json.loads(to_json(trajectory))) == trajectory
    samples = trajectory_samples(trajectory, [float(i) for i in range(len(trajectory.turns))])
    assert sum(sample.action_tokens for sample in samples) == trajectory.action_tokens
    for index, ((_, call), context) in enumerate(zip(answered, contexts, strict=True)):
        _, prompt, _, generation = program.engine.seen[(2**64 - 3 + call.index) % 2**64]
        assert prompt == context == call.prompt_ids
        (sample,) = (sample for sample in samples if index in sample.turns)
        start = sample.turns.index(index)
        trained = slice(start, start + len(generation.token_ids))
        assert sample.token_ids[:start] == context
        assert sample.token_ids[trained] == generation.token_ids
        assert sample.logprobs[trained] == generation.logprobs
        assert set(sample.turns[trained]) == {index} and set(sample.advantages[trained]) == {float(index)}
    program.session.close()
    assert not program.engine.open_ids


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_part_of_the_calls_keeps_the_contexts(tiny_codec, data):
    calls = [call for _, call in run(Program(data, tiny_codec).scenario())]
    part = [call for call in calls if data.draw(st.booleans(), label="kept")]
    assert trained_contexts(turns_of(part)) == [call.prompt_ids for call in part]


# -- single cases -----------------------------------------------------------------------------------------------------


async def turns_of_two_calls(codec, change, tools=None, reply="well <sql>", **fields):
    """Return the turns of two calls; the second continues with the first one's answer as changed by `change`."""
    session = session_of(WatchedEngine(replies(codec, reply)), codec)
    (first,) = await session.chat(chat(USER, tools=tools, **fields))
    await session.chat(chat(USER, change(wire(first)), {"role": "tool", "content": "46"}, tools=tools, **fields))
    return session.turns()


class RecordingEngine(WatchedEngine):
    """An engine of which the expert that computes a token has the token's own id."""

    async def generate(self, trajectory_id, prompt, sampling):
        generation = await super().generate(trajectory_id, prompt, sampling)
        generation.experts = np.array([*prompt, *generation.token_ids[:-1]], dtype=np.int16)[:, None, None]
        return generation


def test_samples_have_the_experts_of_the_token_before_each_token(tiny_codec):
    session = session_of(RecordingEngine(replies(tiny_codec, "well <sql>", "hm")), tiny_codec)

    async def calls():
        (first,) = await session.chat(chat(USER))
        for content in ("46", "46", "47"):
            await session.chat(chat(USER, wire(first), {"role": "tool", "content": content}))

    run(calls())
    samples = trajectory_samples(trajectory_of(session), [0.0] * 4)
    assert [len(set(sample.turns)) for sample in samples] == [3, 2, 2]  # with -1 for tokens that were not sampled
    for sample in samples:
        assert sample.experts[:, 0, 0].tolist() == [-1, *sample.token_ids[:-1]]


TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1.0, "x": [2]}}</tool_call>'


def rewritten(message):
    (call,) = message["tool_calls"]
    call["id"], call["function"]["arguments"] = "mine", '{ "x": [2],  "at": 1 }'
    return {**message, "content": None}


@pytest.mark.parametrize(
    ("reply", "change", "reason"),
    [
        ("hm", lambda m: m, None),
        ("hm", lambda m: {**m, "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]}, None),
        ("hm", lambda m: {**m, "reasoning_content": "much thought", "refusal": None, "annotations": []}, None),
        ("", lambda m: {**m, "content": None}, None),
        (CALL, rewritten, None),
        (CALL, lambda m: {**m, "tool_calls": []}, "edited"),
        (CALL + "<tool_call>{oops</tool_call>", lambda m: m, None),
        (" hm\n\n", lambda m: {**m, "content": "hm"}, None),
        ("hm", lambda m: {**m, "content": "\thm "}, None),
        ("h m", lambda m: {**m, "content": "hm"}, "edited"),
        ("hm", lambda m: {**m, "content": "hm."}, "edited"),
        ("hm", lambda m: {"role": "user", "content": "hm"}, "edited"),
    ],
)
def test_a_reformatted_answer_is_recognised(tiny_codec, reply, change, reason):
    turns = run(turns_of_two_calls(tiny_codec, change, [TOOL], reply))
    assert [turn.break_reason for turn in turns] == [None, reason]


def test_a_stripped_answer_keeps_its_sampled_tokens(tiny_codec):
    first, second = run(
        turns_of_two_calls(tiny_codec, lambda m: {**m, "content": m["content"].strip()}, reply="  well \n")
    )
    assert tiny_codec.decode(first.action_ids) == "  well \n" and second.observation_ids[0] != tiny_codec.encode("w")[0]
    assert tiny_codec.decode(second.observation_ids) == "46" and second.break_reason is None


def test_white_space_of_other_roles_counts(tiny_codec):
    async def scenario():
        session = session_of(WatchedEngine(replies(tiny_codec, "a", "b")), tiny_codec)
        (first,) = await session.chat(chat(SYSTEM, USER))
        await session.chat(chat(SYSTEM, {**USER, "content": "question "}, wire(first), MORE))
        return session.turns()

    assert [turn.break_reason for turn in run(scenario())] == [None, "fresh"]


def test_the_answer_with_the_same_white_space_is_preferred(tiny_codec):
    async def scenario():
        session = session_of(WatchedEngine(replies(tiny_codec, "yes ", "yes")), tiny_codec)
        calls = await session.chat(chat(USER, n=2))
        more = [(await session.chat(chat(USER, wire(call), USER)))[0] for call in calls]
        return [call.parent for call in more] == calls

    assert run(scenario()), "the newest would be the second, and a free one too"


def test_requests_without_tools_get_the_plain_text(chatml_tokenizer):
    """Qwen3's renderer parses calls also without tools."""
    codec = Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "qwen3"))
    reply = 'I look. <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

    async def scenario():
        session = session_of(WatchedEngine(replies(codec, reply)), codec)
        (first,) = await session.chat(chat(USER))
        assert wire(first)["content"] == reply and first.finish_reason == "stop" and "tool_calls" not in wire(first)
        await session.chat(chat(USER, wire(first), USER))
        return session.turns()

    assert [turn.break_reason for turn in run(scenario())] == [None, None]


def test_other_tools_make_another_history(tiny_codec):
    async def scenario():
        session = session_of(WatchedEngine(replies(tiny_codec, "a", "b")), tiny_codec)
        (first,) = await session.chat(chat(USER))
        await session.chat(chat(USER, wire(first), USER, tools=[TOOL]))
        return session.turns()

    assert [turn.break_reason for turn in run(scenario())] == [None, "edited"]


def test_reasoning_dropped_by_the_client_stays_in_the_context(chatml_tokenizer):
    codec = Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "qwen3"))
    reply = "<think>\nhm\n</think>\n\nyes"
    first, second = run(
        turns_of_two_calls(codec, lambda m: {"role": "assistant", "content": m["content"]}, reply=reply)
    )
    assert first.message["reasoning_content"].strip() == "hm" and second.break_reason is None


def test_the_context_is_rendered_again_if_it_cannot_be_extended(chatml_tokenizer):
    """Qwen3's renderer cannot extend a context by an assistant message that was not sampled."""
    codec = Codec(chatml_tokenizer, make_renderer(chatml_tokenizer, "qwen3"))

    async def scenario(*more):
        session = session_of(WatchedEngine(replies(codec, "  yes")), codec)
        (first,) = await session.chat(chat(USER))
        await session.chat(chat(USER, wire(first), *more))
        return session.turns()

    turns = run(scenario(USER, {"role": "assistant", "content": "never sampled"}, USER))
    assert turns[1].break_reason in ("edited", None)
    assert codec.tokenizer.decode(turns[1].observation_ids).count("never sampled") == 1


def test_a_call_without_continuation_is_preferred(tiny_codec):
    async def scenario():
        session = session_of(WatchedEngine(replies(tiny_codec, "same")), tiny_codec)
        calls = await session.chat(chat(USER, n=3))
        for _ in calls:
            await session.chat(chat(USER, wire(calls[0]), {"role": "user", "content": "more"}))
        return session.turns()

    turns = run(scenario())
    assert [turn.break_reason for turn in turns] == [None, "branch", "branch", None, None, None]
    assert [turn.parent for turn in turns] == [None, None, None, None, 1, 0]


def test_a_cancelled_call_is_not_continued(tiny_codec):
    async def scenario():
        engine = WatchedEngine(replies(tiny_codec, "same"))
        session = session_of(engine, tiny_codec)
        calls = await session.chat(chat(USER, n=2))
        engine.gate.clear()
        cancelled = asyncio.ensure_future(session.chat(chat(USER, wire(calls[0]), USER)))
        await until_all_wait()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        engine.gate.set()
        (call,) = await session.chat(chat(USER, wire(calls[0]), USER))
        return call.parent is calls[1] and calls[1].children == 1

    assert run(scenario()), "the newest is free again"


def test_message_keys_ignore_formatting():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    spoken = {"role": "assistant", "content": 'so <tool_call>{"name": "f"}</tool_call>STOP more', "tool_calls": [call]}
    assert client_message(spoken, ("STOP", "more")) == {"role": "assistant", "content": "so ", "tool_calls": [call]}
    assert truncate_at_stop("a stop b end", ("end", "stop")) == "a " and truncate_at_stop("abc", ()) == "abc"
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm STOP"}
    assert client_message(thought, ("STOP",)) == {**thought, "reasoning_content": "hm "}


def test_message_keys_distinguish_names_and_arguments():
    def key(name, arguments):
        function = {"name": name, "arguments": arguments}
        return message_key({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})

    assert key("f", {"a": 1}) == key("f", '{"a": 1.0}') == key("f", '{"a": 2, "a": 1}') and key("f", "") == key("f", {})
    assert len({key("f", {}), key("g", {}), key("f", {"a": 1}), key("f", "{oops"), key("f", "{oops}")}) == 5
    assert key("f", "[" * 9999) == key("f", "[" * 9999)


def test_arguments_that_are_no_object_may_come_back_inside_one():
    """Pydantic AI sends them back so, since some APIs take only objects."""

    def key(arguments):
        function = {"name": "", "arguments": arguments}
        return message_key({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})

    for arguments in ("{oops", "[1, 2]", '"é"', "NaN"):
        assert key({INVALID_JSON: arguments}) == key(arguments)
    distinct = [{INVALID_JSON: "{oops"}, {INVALID_JSON: "{"}, {INVALID_JSON: {"a": 1}}, {INVALID_JSON: "{oops", "a": 1}]
    assert len({key(arguments) for arguments in (*distinct, {"a": 1}, {})}) == 6


# -- texts and token ids ----------------------------------------------------------------------------------------------


async def texts(codec, *made, says_stop=True, **fields):
    """Request completions one after the other; each prompt is made from the call before."""
    answer = replies(codec, "one", "two", "three")
    engine = WatchedEngine(answer if says_stop else lambda number: answer(number)[:-1])
    session = session_of(engine, codec)
    calls = []
    for make in made:
        calls += await session.complete(text(make(*calls[-1:]), **fields))
    return session.turns(), calls


def test_a_text_continues_a_text(tiny_codec):
    made = lambda: "how many", lambda call: f"how many{call.text} and then"
    turns, calls = run(texts(tiny_codec, *made, says_stop=False))
    assert [turn.break_reason for turn in turns] == [None, None]
    assert turns[1].observation_ids == tiny_codec.encode(" and then")
    assert turns[1].observation == [{"role": "user", "content": " and then"}]
    assert calls[1].prompt_ids == tiny_codec.encode("how many") + turns[0].action_ids + turns[1].observation_ids


def test_a_text_without_the_closing_token_is_a_break(tiny_codec):
    turns, calls = run(texts(tiny_codec, lambda: "how many", lambda call: f"how many{call.text} and"))
    assert turns[1].break_reason == "template"
    end = tiny_codec.stop_token_ids[0]
    assert turns[0].action_ids[-1] == end and end not in calls[1].prompt_ids


def test_a_text_with_the_closing_token_continues(tiny_codec):
    """Programs with a chat template of their own send such prompts."""
    end = tiny_codec.tokenizer.decode(list(tiny_codec.stop_token_ids))
    turns, calls = run(texts(tiny_codec, lambda: "how many", lambda call: f"how many{call.text}{end} and"))
    assert [turn.break_reason for turn in turns] == [None, None]
    assert turns[1].observation_ids == tiny_codec.encode(" and")
    assert calls[1].prompt_ids == calls[0].tokens + tiny_codec.encode(" and")


def test_an_empty_answer_leaves_the_prompt_unchanged(tiny_codec):
    end = tiny_codec.tokenizer.decode(list(tiny_codec.stop_token_ids))

    async def scenario():
        session = session_of(WatchedEngine(lambda _: ([], FinishReason.LENGTH)), tiny_codec)
        await session.complete(text(f"how many{end}"))
        await session.complete(text(f"how many{end} and"))
        return session.turns()

    first, second = run(scenario())
    assert second.break_reason is None and second.observation_ids == tiny_codec.encode(" and")
    assert first.observation_ids[-1] == tiny_codec.stop_token_ids[0]


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=9), st.lists(st.binary(max_size=3), max_size=9))
def test_prefixes_match_their_definition(parts, others):
    """Prefixes are compared with those by the definition."""
    prefixes, added = PrefixIndex(), [b"".join(parts[:i]) for i in range(0, len(parts), 2)] + others
    for name, data in enumerate(added):
        prefixes.add(data, name)
    whole = b"".join(parts)
    found = {data: [name for name, other in enumerate(added) if other == data] for data in added}
    right = [(len(data), names) for data, names in sorted(found.items()) if whole.startswith(data)]
    assert list(prefixes.prefixes(whole)) == right
    ends = [len(b"".join(parts[:i])) for i in range(len(parts) + 1)]
    assert list(prefixes.prefixes(whole, ends)) == [(length, names) for length, names in right if length in ends]


def test_unrelated_texts_are_fresh(tiny_codec):
    prompts = ["how many", "how many", "how many apples", "the answer"]
    turns, _ = run(texts(tiny_codec, *(lambda *_, prompt=prompt: prompt for prompt in prompts)))
    assert [turn.break_reason for turn in turns] == [None, "retry", "edited", "fresh"]


def test_token_ids_are_used_unchanged(tiny_codec):
    odd = [tiny_codec.tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    made = [lambda: odd, lambda call: [*call.tokens, 9, 10], lambda call: [*call.tokens[:-1], 11]]
    made += [lambda _: odd, lambda _: [*odd, 5], lambda _: [5, *odd]]
    turns, calls = run(texts(tiny_codec, *made))
    assert [turn.break_reason for turn in turns] == [None, None, "branch", "retry", "edited", "fresh"]
    assert calls[0].prompt_ids == odd and turns[1].observation_ids == [9, 10]


def test_chat_text_and_ids_are_different_requests(tiny_codec):
    async def scenario():
        session = session_of(WatchedEngine(replies(tiny_codec, "one", "two", "three")), tiny_codec)
        await session.chat(chat(USER))
        await session.complete(text("question"))
        await session.complete(text(tiny_codec.encode("question")))
        return session.turns()

    assert [turn.break_reason for turn in run(scenario())] == [None, "fresh", "fresh"]
