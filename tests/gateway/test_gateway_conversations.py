"""The conversations of a program's calls, and calls that are left out of training."""

import asyncio
from dataclasses import replace
from itertools import combinations

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
    trained_contexts,
    trajectory_of,
    wire,
)

from mtrl.gateway.conversations import conversations_of, kinds_of
from mtrl.trainer.data.samples import trajectory_samples

SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "look", "parameters": {"type": "object"}}}]
ALL = ("side", "sub_agent", "retried")


def user(content):
    return {"role": "user", "content": content}


class Program:
    """A program at a session: `ask` sends messages, and returns them with the answer."""

    def __init__(self, codec, *leave_out, texts=tuple(f"answer {number}" for number in range(20))):
        self.session = session_of(WatchedEngine(replies(codec, *texts)), codec)
        self.session.limits = replace(self.session.limits, leave_out=leave_out)
        self.calls = []
        """The answered calls in the order in which they began, since no two requests run at the same time."""

    def send(self, *messages, **fields):
        calls = run(self.session.chat(chat(*messages, **fields)))
        self.calls += calls
        return calls

    def ask(self, *messages, **fields):
        (call,) = self.send(*messages, **fields)
        return [*messages, wire(call)]

    def kinds(self):
        found = kinds_of(self.calls)
        return [found[call] for call in self.calls]


def a_command_line_agent(program):
    """A title before the conversation, a sub-agent within it, a request that is sent again, and a compaction."""
    program.ask(SYSTEM, USER, user("a title for it"))
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    agent = program.ask(user("find the file"))
    program.ask(*agent, user("more"))
    program.ask(*main, user("the file is a.py"), tools=TOOLS)
    main = program.ask(*main, user("the file is a.py"), tools=TOOLS)
    main = program.ask(*main, user("go on"), tools=TOOLS)
    program.ask(SYSTEM, USER, user("so far: a.py"), tools=TOOLS)


def test_requests_with_equal_tools_share_one_list(tiny_codec):
    """A comparison of the tools of all conversations would otherwise take seconds for a thousand calls."""
    program, other_order = Program(tiny_codec), [dict(reversed(tool.items())) for tool in TOOLS]
    for number, tools in enumerate([TOOLS, other_order, TOOLS]):
        program.ask(user(f"question {number}"), tools=tools)
    first, second, third = (call.tools for call in program.calls)
    assert first is third and first is not second
    assert [list(tools[0]) for tools in (first, second)] == [list(TOOLS[0]), list(other_order[0])], "the order counts"
    assert len(conversations_of(program.calls)) == 3


KINDS = ["side", None, "sub_agent", "sub_agent", "retried", None, None, None]


def test_kinds(tiny_codec):
    program = Program(tiny_codec)
    a_command_line_agent(program)
    assert program.kinds() == KINDS
    assert len(trajectory_of(program.session).turns) == 8, "calls were left out without a setting"
    names = ("side", "sub_agent", "retried")
    assert [program.session.metrics[f"gateway/{name}_calls"] for name in names] == [1, 2, 1]


@pytest.mark.parametrize("leave_out", [("side",), ("sub_agent",), ("retried",), ALL])
def test_calls_that_are_left_out_are_not_trained(tiny_codec, leave_out):
    programs = Program(tiny_codec), Program(tiny_codec, *leave_out)
    for program in programs:
        a_command_line_agent(program)
        program.session.set_rewards([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    whole, part = map(trajectory_of, [program.session for program in programs])
    kept = [turn.text for turn, kind in zip(whole.turns, KINDS, strict=True) if kind not in leave_out]
    assert [turn.text for turn in part.turns] == kept
    assert part.reward == whole.reward == 255.0
    assert trajectory_of(programs[1].session).rewards == part.rewards, "turns() changed the rewards"
    samples = trajectory_samples(part, [1.0] * len(part.turns))
    contexts = [call.tokens for call in programs[1].calls]
    assert sum(map(sum, (sample.loss_mask for sample in samples))) == part.action_tokens
    for sample in samples:
        assert sample.token_ids in contexts, "a sample is no context that the model saw"


def test_the_next_call_that_remains_gets_the_reward(tiny_codec):
    program = Program(tiny_codec, *ALL)
    a_command_line_agent(program)
    program.session.set_rewards([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    assert trajectory_of(program.session).rewards == [3.0, 60.0, 64.0, 128.0]
    program.session.set_rewards(5.0)
    assert trajectory_of(program.session).rewards == [0.0, 0.0, 0.0, 5.0]


def test_a_retried_call_of_a_sub_agent_is_left_out_with_it(tiny_codec):
    """The client lost the first answer to the second request of the sub-agent."""
    program = Program(tiny_codec, "sub_agent")
    main = [USER]
    for _ in range(3):
        main = [*program.ask(*main), user("go on")]
    agent = program.ask(SYSTEM, user("find the file"))
    for _ in range(2):
        program.ask(*agent, user("more"))
    assert program.kinds() == [None] * 3 + ["sub_agent"] * 3
    assert [turn.text for turn in program.session.turns()] == ["answer 0", "answer 1", "answer 2"]


def test_a_side_request_that_is_sent_twice_is_still_one(tiny_codec):
    program = Program(tiny_codec, "side")
    for _ in range(3):
        program.ask(user("a title for it"))
    program.send(user("three titles for it"), n=3)
    program.ask(*program.ask(USER), user("go on"))
    assert program.kinds() == [*["side"] * 6, None, None], "the main conversation has the most different requests"
    assert [turn.text for turn in program.session.turns()] == ["answer 6", "answer 7"]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_turns_are_trained_behind_the_contexts_in_which_they_were_sampled(tiny_codec, data):
    """Conversations go on, are repeated, forked, edited or begun in any order, for each choice of `leave_out`."""
    calls_tool = data.draw(st.lists(st.booleans(), min_size=10, max_size=10), label="calls a tool")
    answers = [f"{LOOK if calls else ''} answer {number}" for number, calls in enumerate(calls_tool)]
    program = Program(tiny_codec, texts=answers)
    histories = [([SYSTEM, user(text)], tools) for text in ("one", "two") for tools in (None, TOOLS)]
    for _ in range(data.draw(st.integers(1, 10), label="requests")):
        messages, tools = data.draw(st.sampled_from(histories[-4:]), label="history")
        answered = program.ask(*messages, tools=tools)
        if data.draw(st.integers(0, 4), label="edited") == 0:
            answered[-1] = {"role": "assistant", "content": "never sampled"}
        histories.append(([*answered, user("more")], tools))
    seen = {tuple(generation.token_ids): prompt for _, prompt, _, generation in program.session.engine.seen.values()}
    for leave_out in (kinds for count in range(4) for kinds in combinations(ALL, count)):
        program.session.limits = replace(program.session.limits, leave_out=leave_out)
        turns = program.session.turns()
        assert trained_contexts(turns) == [seen[tuple(turn.action_ids)] for turn in turns], leave_out
        assert len(turns) == sum(kind not in leave_out for kind in program.kinds())


def test_one_call_is_the_main_conversation(tiny_codec):
    program = Program(tiny_codec, *ALL)
    program.ask(user("a title"))
    program.ask(USER, tools=TOOLS)
    assert program.kinds() == ["side", None], "tools mark the main conversation"
    alone = Program(tiny_codec, *ALL)
    alone.ask(USER)
    assert alone.kinds() == [None] and len(trajectory_of(alone.session).turns) == 1
    assert trajectory_of(Program(tiny_codec, *ALL).session).turns == []


LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def test_a_sub_agent_with_more_calls_than_the_main_conversation(tiny_codec):
    """The main conversation waits for it after a call of a tool, and it waits for the agent that it starts itself."""
    texts = [LOOK, *["found"] * 3, LOOK, "more", "done", "found it", "the end"]
    program = Program(tiny_codec, "sub_agent", texts=texts)
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    agent = program.ask(user("find the file"), tools=TOOLS)
    for _ in range(3):
        agent = program.ask(*agent, user("more"), tools=TOOLS)
    inner = program.ask(user("look again"))
    program.ask(*inner, user("go on"))
    program.ask(*agent, user("found it"), tools=TOOLS)
    program.ask(*main, user("a.py"), tools=TOOLS)
    assert program.kinds() == [None, *["sub_agent"] * 7, None]
    assert [turn.text for turn in trajectory_of(program.session).turns] == [LOOK, "the end"]


def test_titles_before_and_after_the_main_conversation(tiny_codec):
    """Both requests for a title are one conversation, which calls no tool."""
    program = Program(tiny_codec)
    title = program.ask(user("a title for it"))
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    program.ask(*program.ask(*main, user("go on"), tools=TOOLS), user("go on"), tools=TOOLS)
    program.ask(*title, user("a better title"))
    assert program.kinds() == ["sub_agent", None, None, None, "sub_agent"]


def test_a_conversation_about_another_one(tiny_codec):
    """As Qwen Code's search for what to remember: other instructions, fewer tools, and the whole conversation."""
    program = Program(tiny_codec)
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    main = program.ask(*main, user("go on"), tools=TOOLS)
    memory = program.ask({**SYSTEM, "content": "remember"}, *main[1:], user("what is worth remembering?"))
    program.ask(*memory, user("go on"))
    assert program.kinds() == [None, None, "sub_agent", "sub_agent"], "of as many calls the first conversation is main"


@pytest.mark.parametrize("instructions", ["you are billing", "it is 10:05"])
def test_a_handoff_goes_on_with_other_instructions_and_fewer_tools(tiny_codec, instructions):
    """The first agent calls a tool, which starts another one with the whole history."""
    program = Program(tiny_codec, texts=[LOOK] * 5)
    main = program.ask(SYSTEM, USER, tools=[*TOOLS, *TOOLS])
    main = program.ask({**SYSTEM, "content": instructions}, *main[1:], user("ok"), tools=TOOLS)
    for _ in range(3):
        main = program.ask(*main, user("ok"), tools=TOOLS)
    assert program.kinds() == ["side", None, None, None, None]


def test_a_sub_agent_that_uses_up_the_calls(tiny_codec):
    """The main conversation still waits for it at the end of the episode."""
    program = Program(tiny_codec, texts=[LOOK] * 5)
    program.ask(SYSTEM, USER, tools=TOOLS)
    agent = program.ask(user("find the file"), tools=TOOLS)
    for _ in range(3):
        agent = program.ask(*agent, user("more"), tools=TOOLS)
    assert program.kinds() == [None, *["sub_agent"] * 4]


def test_a_conversation_that_was_asked_for_before_an_answer_is_not_beside_it(tiny_codec):
    """Two workers run at the same time: the one with the most calls is the main conversation, though the other one goes
    on last."""
    program = Program(tiny_codec, texts=[LOOK] * 12)

    async def both():
        requests = [program.session.chat(chat(user(name), tools=TOOLS)) for name in ("one", "two")]
        return [call for calls in await asyncio.gather(*requests) for call in calls]

    program.calls += run(both())
    one, two = ([user(name), wire(call)] for name, call in zip(("one", "two"), program.calls, strict=True))
    for _ in range(3):
        two = program.ask(*two, user("more"), tools=TOOLS)
    program.ask(*one, user("more"), tools=TOOLS)
    assert program.kinds() == ["sub_agent", None, None, None, None, "sub_agent"]


def test_a_conversation_that_outlasts_another_one_is_not_beside_it(tiny_codec):
    """A program goes on with both of its conversations, and the second one has the most calls."""
    program = Program(tiny_codec, texts=[LOOK] * 12)
    one = program.ask(SYSTEM, USER, tools=TOOLS)
    two = program.ask(user("find the file"), tools=TOOLS)
    program.ask(*one, user("more"), tools=TOOLS)
    program.ask(*program.ask(*two, user("more"), tools=TOOLS), user("more"), tools=TOOLS)
    assert program.kinds() == ["sub_agent", None, "sub_agent", None, None]


def test_a_conversation_that_called_a_tool_before_its_latest_answer_does_not_wait(tiny_codec):
    """The user reads the answer and starts another conversation before going on."""
    program = Program(tiny_codec, texts=[LOOK, *["answer"] * 9])
    one = program.ask(SYSTEM, USER, tools=TOOLS)
    one = program.ask(*one, user("a.py"), tools=TOOLS)
    two = program.ask(user("another question"), tools=TOOLS)
    for _ in range(3):
        two = program.ask(*two, user("more"), tools=TOOLS)
    program.ask(*one, user("thanks"), tools=TOOLS)
    assert program.kinds() == ["sub_agent", "sub_agent", *[None] * 4, "sub_agent"]


@pytest.mark.parametrize(
    ("system", "tools"), [(SYSTEM, None), ({**SYSTEM, "content": "be brief today"}, [*TOOLS, *TOOLS])]
)
def test_a_conversation_whose_tools_change_is_not_about_itself(tiny_codec, system, tools):
    """The program finds further tools, or loses them: the part with the most calls is the main conversation."""
    program = Program(tiny_codec)
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    main = program.ask(system, *main[1:], user("go on"), tools=tools)
    program.ask(*main, user("go on"), tools=tools)
    assert program.kinds() == ["side", None, None]


def test_a_conversation_that_goes_on_with_other_tools_for_a_while(tiny_codec):
    """Its part with the most calls is the main conversation, though it begins and ends within the other one."""
    program = Program(tiny_codec)
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    for _ in range(3):
        main = program.ask(*main, user("go on"), tools=[*TOOLS, *TOOLS])
    program.ask(*main, user("back"), tools=TOOLS)
    assert program.kinds() == ["sub_agent", None, None, None, "sub_agent"]


def test_an_answer_that_a_compaction_keeps(tiny_codec):
    """No message of the user remains, and the tools are the same: the conversation goes on."""
    program = Program(tiny_codec)
    main = program.ask(SYSTEM, USER, tools=TOOLS)
    program.ask(SYSTEM, user("so far: a.py"), main[-1], user("go on"), tools=TOOLS)
    assert program.kinds() == [None, None]


def test_a_conversation_after_another_is_the_main_one_if_it_has_more_calls(tiny_codec):
    program = Program(tiny_codec)
    program.ask(*program.ask(USER, tools=TOOLS), user("the plan is good"), tools=TOOLS)
    doing = program.ask(user("follow the plan"), tools=TOOLS)
    program.ask(*program.ask(*doing, user("go on"), tools=TOOLS), user("go on"), tools=TOOLS)
    assert program.kinds() == ["sub_agent", "sub_agent", None, None, None]


def test_votes_of_one_request_are_not_retried(tiny_codec):
    program = Program(tiny_codec, *ALL)
    program.send(USER, n=3)
    assert program.kinds() == [None, None, None]


def test_an_answer_that_is_continued_is_not_retried(tiny_codec):
    program = Program(tiny_codec, *ALL)
    first = program.ask(USER)
    program.ask(USER)
    program.ask(*first, user("more"))
    assert program.kinds() == [None, None, None], "the second answer is a branch, and the newest of its request"
    assert len(conversations_of(program.calls)) == 1
