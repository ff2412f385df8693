"""One episode: its end, its record, and that its environment is always closed."""

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from mtrl.engines.base import EngineLostError
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import StepResult
from mtrl.environments.results import as_messages, as_step_result
from mtrl.rollout.conversation import SingleMessageConversation
from mtrl.types import FinishReason, Generation, StopReason


@pytest.fixture
def stepping(counting):
    """Function `stepping(step, **methods)` that returns an environment class with this `step` method."""

    def make(step=counting.step, **methods):
        return type("Env", (counting,), {"step": step, **methods})

    return make


def closed(counting):
    return [environment.closed for environment in counting.made]


# -- ends of an episode -----------------------------------------------------------------------------------------------


def test_max_turns_ends_the_episode(make_loop, run_episode, counting):
    trajectory = run_episode(make_loop(counting))
    assert trajectory.stop_reason == StopReason.MAX_TURNS
    assert [t.text for t in trajectory.turns] == counting.made[0].received == ["a", "b", "c"]
    assert trajectory.rewards == [0.5] * 3 and closed(counting) == [1]
    assert trajectory.error is None and trajectory.trainable and trajectory.metrics == {"attempts": 1}


def test_a_source_of_a_mixture_has_limits_of_its_own(make_loop, sampling, stepping, counting, tiny_tokenizer):
    """The row of `short` ends after one turn of at most two tokens; its environment is tried three times."""
    lengths = {}

    class Engine(ScriptedEngine):
        async def generate(self, trajectory_id, prompt, sampling):
            lengths.setdefault(trajectory_id, set()).add(sampling.max_generate_length)
            return await super().generate(trajectory_id, prompt, sampling)

    def step(self, response, truth):
        if "short" in truth and len(counting.made) < 4:
            raise OSError("down")
        return 0.5, "next", False

    loop = make_loop(stepping(step), engine=Engine(lambda trajectory, turn: "a", tiny_tokenizer))
    short = replace(loop.limits, max_turns=1, retries=2, max_generate_length=2)
    loop.limits_of_sources = {"short": short, "long": loop.limits}

    def play(name):
        row = {"id": f"{name}/1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {name: 1}}
        return asyncio.run(loop.run(row, name, 0, sampling))

    assert (len(play("long").turns), len(play("short").turns)) == (3, 1)
    assert lengths == {"long/0": {sampling.max_generate_length}, "short/0": {2}}
    assert len(counting.made) == 4 and play("long").metrics == {"attempts": 1}


def test_no_turn_exceeds_the_context_of_a_source(make_loop, sampling, counting):
    """The engine's own limit is that of the run, 200 tokens."""
    loop = make_loop(counting, respond=["abcdefghij" * 3] * 3)
    loop.limits_of_sources = {"short": replace(loop.limits, max_context_length=20)}
    row = {"id": "short/1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {}}
    trajectory = asyncio.run(loop.run(row, "g", 0, sampling))
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT
    assert trajectory.context_tokens == 20 and trajectory.turns[-1].finish == FinishReason.LENGTH


def test_done_ends_the_episode(make_loop, run_episode, stepping, counting):
    environment = stepping(lambda self, response, truth: (1.0, None, response == "b"))
    trajectory = run_episode(make_loop(environment))
    assert trajectory.stop_reason == StopReason.DONE and [t.text for t in trajectory.turns] == ["a", "b"]
    assert closed(counting) == [1]


def test_a_truncating_environment_is_not_done(make_loop, run_episode, stepping):
    """Its own limit is lower than the run's, so it ends the episode, but the task is not done."""
    loop = make_loop(stepping(lambda *_: StepResult(0.0, done=True, truncated=True)))
    trajectory = run_episode(loop)
    assert trajectory.stop_reason == StopReason.MAX_TURNS and len(trajectory.turns) == 1


@pytest.mark.parametrize("done", [True, False])
def test_the_last_observation_is_stored_and_not_tokenised(make_loop, run_episode, stepping, tiny_tokenizer, done):
    environment = stepping(lambda self, response, truth: (0.0, f"to {response}", done and response == "c"))
    trajectory = run_episode(make_loop(environment))
    assert trajectory.final_observation == [{"role": "user", "content": "to c"}]
    ids = [i for turn in trajectory.turns for i in turn.observation_ids + turn.action_ids]
    expected = "<|user|>Q<|end|><|assistant|>a<|end|><|user|>to a<|end|><|assistant|>b<|end|><|user|>to b<|end|>"
    assert tiny_tokenizer.decode(ids) == expected + "<|assistant|>c<|end|>"
    assert trajectory.messages[-1] == {"role": "user", "content": "to c"}


def test_a_lost_engine_is_raised(make_loop, run_episode, counting, tiny_tokenizer):
    """No other attempt or episode can run; the environment is closed."""

    class Lost(ScriptedEngine):
        released = ()

        async def generate(self, *words):
            raise EngineLostError("the servers are gone")

        def release(self, trajectory_id):
            self.released = (*self.released, trajectory_id)

    engine = Lost(("a",), tiny_tokenizer)
    with pytest.raises(EngineLostError, match="the servers are gone"):
        run_episode(make_loop(counting, engine=engine, retries=3))
    assert closed(counting) == [1] and len(engine.released) == 1


@pytest.mark.parametrize(("length", "reason"), [(1, StopReason.TURN_TOKEN_LIMIT), (9, StopReason.MAX_TURNS)])
def test_the_stop_reason_of_a_truncated_last_turn(make_loop, run_episode, counting, sampling, length, reason):
    trajectory = run_episode(make_loop(counting), sampling=replace(sampling, max_generate_length=length))
    assert trajectory.stop_reason == reason and len(trajectory.turns) == 3


def test_a_truncated_turn_may_be_done(make_loop, run_episode, stepping, sampling):
    loop = make_loop(stepping(lambda *_: (1.0, None, True)))
    trajectory = run_episode(loop, sampling=replace(sampling, max_generate_length=1))
    assert trajectory.stop_reason == StopReason.DONE


def test_the_context_limit_ends_the_episode(make_loop, run_episode, stepping):
    environment = stepping(lambda self, response, truth: (0.25, "1234567890" * 3, False))
    trajectory = run_episode(make_loop(environment, max_context_length=60, max_turns=9))
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.trainable
    assert len(trajectory.turns) == 2 and trajectory.reward == 0.5
    assert trajectory.final_observation == [{"role": "user", "content": "1234567890" * 3}]
    assert trajectory.messages[-1] == trajectory.final_observation[0]


def test_an_answered_observation_is_not_the_final_one(make_loop, run_episode, stepping):
    """The turn that the environment fails on holds the observation before it."""
    environment = stepping(lambda self, response, truth: (0.0, "to a", False) if response == "a" else 1 / 0)
    trajectory = run_episode(make_loop(environment))
    assert "division by zero" in trajectory.error and trajectory.final_observation == []
    assert [m["content"] for m in trajectory.messages][-2:] == ["to a", "b"]


@pytest.mark.parametrize(
    ("limits", "done", "turns", "rewards"),
    [
        ({"max_context_length": 60, "max_turns": 9}, False, 2, [0.25, 0.125]),  # out of context
        ({"max_turns": 3}, False, 3, [0.25, 0.25, 0.125]),  # out of turns
        ({"max_turns": 3}, True, 1, [0.25]),  # the environment has ended it
    ],
)
def test_truncation_rewards_the_last_turn(make_loop, run_episode, stepping, limits, done, turns, rewards):
    environment = stepping(lambda *_: StepResult(0.25, "1234567890" * 3, done, components={"search": 0.25}))
    environment.truncate = lambda self, ground_truth: {"settlement": -0.25, "search": 0.125}
    trajectory = run_episode(make_loop(environment, **limits))
    assert len(trajectory.turns) == turns and trajectory.rewards == rewards
    if not done:
        assert trajectory.turns[-1].components == {"search": 0.375, "settlement": -0.25}


def test_a_step_result_of_truncation_has_its_own_reward_and_metrics(make_loop, run_episode, stepping):
    environment = stepping(lambda *_: StepResult(0.5, "more", False, {"a": 1.0}, {"m": 1.0, "n": 2.0}))
    environment.truncate = lambda self, ground_truth: StepResult(0.25, components={"a": 1.0}, metrics={"m": 3.0})
    last = run_episode(make_loop(environment, max_turns=1)).turns[-1]
    assert (last.reward, last.components, last.metrics) == (0.75, {"a": 2.0}, {"m": 3.0, "n": 2.0})


@pytest.mark.parametrize(
    ("payments", "sentence"),
    [
        (None, "Env.truncate returned None; it must return a mapping from names to numbers"),
        ({"a": float("nan")}, "Env.truncate returned components['a'] = nan; it must be a finite number"),
        (StepResult(float("inf")), "Env.truncate returned the reward inf; it must be a finite number"),
    ],
)
def test_an_invalid_truncation_reward_fails_the_episode(make_loop, run_episode, stepping, payments, sentence):
    environment = stepping(lambda *_: (0.25, "x", False))
    environment.truncate = lambda self, ground_truth: payments
    trajectory = run_episode(make_loop(environment))
    assert trajectory.stop_reason == StopReason.ENV_ERROR and sentence in trajectory.error.splitlines()[0]


def test_a_prompt_that_does_not_fit_fails_the_episode(make_loop, run_episode, stepping, counting):
    """`reset` makes the prompt too long, so no check of the rows can detect it."""
    opening = [{"role": "user", "content": "1" * 300}]
    trajectory = run_episode(make_loop(stepping(reset=lambda self, row: opening)))
    assert trajectory.stop_reason == StopReason.ENV_ERROR and trajectory.turns == [] and not trajectory.trainable
    first_line = trajectory.error.splitlines()[0]
    assert "has 303 tokens but generator.max_context_length is 200; raise it or leave the row out" in first_line
    assert closed(counting) == [1]


def test_an_engine_that_closes_aborts_the_episode(make_loop, run_episode, counting, tiny_model, sampling, row):
    from mtrl.engines.local.engine import LocalEngine

    engine = LocalEngine(tiny_model, None, max_context_length=200)
    loop = make_loop(counting, engine=engine)

    async def go():
        running = asyncio.ensure_future(
            loop.run(row, "g", 0, replace(sampling, max_generate_length=150, stop_token_ids=()))
        )
        while engine.stats.prompt_tokens == 0:
            await asyncio.sleep(0.001)
        await engine.close()
        return await running

    trajectory = asyncio.run(asyncio.wait_for(go(), 30))
    assert trajectory.stop_reason == StopReason.ABORTED and not trajectory.trainable and closed(counting) == [1]


# -- environments -----------------------------------------------------------------------------------------------------


def test_reset_may_replace_the_prompt(make_loop, run_episode, stepping, row):
    opening = [{"role": "system", "content": "S"}, {"role": "user", "content": "other"}]
    trajectory = run_episode(make_loop(stepping(reset=lambda self, row: opening)))
    assert trajectory.turns[0].observation == opening
    assert run_episode(make_loop(stepping())).turns[0].observation == row["prompt"]


def test_everything_may_be_async(make_loop, run_episode, stepping, counting):
    async def reset(self, row):
        await asyncio.sleep(0)

    async def step(self, response, truth):
        await asyncio.sleep(0.001)
        return StepResult(1.0, "more", response == "b", components={"part": 1.0}, metrics={"seen": 2})

    async def close(self):
        self.closed += 1

    trajectory = run_episode(make_loop(stepping(step, reset=reset, close=close)))
    assert trajectory.stop_reason == StopReason.DONE and trajectory.rewards == [1.0, 1.0]
    assert trajectory.turns[0].components == {"part": 1.0} and trajectory.turns[0].metrics == {"seen": 2.0}
    assert closed(counting) == [1]


def test_messages_and_tool_results(make_loop, run_episode, stepping, tiny_tokenizer):
    reply = {
        "a": {"role": "tool", "content": "46"},
        "b": [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}],
    }
    trajectory = run_episode(
        make_loop(stepping(lambda self, response, truth: (0, reply.get(response), response == "c")))
    )
    received = [tiny_tokenizer.decode(t.observation_ids) for t in trajectory.turns[1:]]
    assert received == ["<|tool|>46<|end|><|assistant|>", "<|tool|>1<|end|><|user|>2<|end|><|assistant|>"]


def test_an_empty_observation_is_allowed(make_loop, run_episode, stepping):
    trajectory = run_episode(make_loop(stepping(lambda *_: (0.0, None, False))))
    assert trajectory.stop_reason == StopReason.MAX_TURNS and trajectory.turns[1].observation == []


def test_changes_to_a_row_do_not_reach_other_episodes(make_loop, run_episode, stepping, row):
    def reset(self, row):
        row["prompt"][0]["content"] += "!"
        row["ground_truth"]["answer"] = "changed"
        return row["prompt"]

    loop = make_loop(stepping(reset=reset))
    first, second = run_episode(loop), run_episode(loop)
    assert first.turns[0].observation == second.turns[0].observation == [{"role": "user", "content": "Q!"}]
    assert row["ground_truth"] == {"answer": "x"}


def test_changes_to_sent_messages_have_no_effect(make_loop, run_episode, stepping):
    def step(self, response, truth):
        self.reply = getattr(self, "reply", {"role": "user", "content": ""})
        self.reply["content"] += response
        return 0.0, self.reply, False

    trajectory = run_episode(make_loop(stepping(step)))
    assert [t.observation[0]["content"] for t in trajectory.turns] == ["Q", "a", "ab"]


def test_the_single_message_layout(make_loop, run_episode, counting, tiny_tokenizer):
    trajectory = run_episode(make_loop(counting, layout=SingleMessageConversation))
    ids = [i for turn in trajectory.turns for i in turn.observation_ids + turn.action_ids]
    assert tiny_tokenizer.decode(ids) == "<|user|>Q<|end|><|assistant|>aheard abheard bc<|end|>"


def test_every_turn_and_attempt_has_its_own_random_stream(make_loop, run_episode, stepping, tiny_model):
    """In the single-message layout an empty observation repeats the context; one stream would repeat its tokens."""
    seeds = []

    class Engine:
        def __init__(self):
            self.open = self.release = lambda trajectory_id: None

        async def generate(self, trajectory_id, prompt_ids, sampling):
            seeds.append(sampling.seed)
            return Generation([0], [0.0], FinishReason.STOP, [(0, 1)])

    def step(self, response, truth):
        if len(seeds) == 3:
            raise RuntimeError
        return 0.0, None, False

    loop = make_loop(stepping(step), layout=SingleMessageConversation, engine=Engine(), retries=1, max_turns=4)
    assert run_episode(loop).stop_reason == StopReason.MAX_TURNS
    assert len(seeds) == len(set(seeds)) == 7


# -- failures ---------------------------------------------------------------------------------------------------------


def fail(*_, **__):
    raise ValueError("the well is dry")


@pytest.mark.parametrize("where", ["step", "reset", "close"])
def test_errors_are_retried_in_fresh_environments_and_then_stored(make_loop, run_episode, stepping, counting, where):
    def close(self):
        self.closed += 1
        fail()

    environment = stepping(**{where: close if where == "close" else fail})
    trajectory = run_episode(make_loop(environment, retries=2))
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
    assert trajectory.metrics["attempts"] == 3 and closed(counting) == [1, 1, 1]
    assert trajectory.error.splitlines()[0] == "ValueError: the well is dry"
    assert "Traceback" in trajectory.error and "in fail" in trajectory.error


def test_an_environment_that_cannot_be_created_fails_the_episode(make_loop, run_episode, stepping, counting):
    trajectory = run_episode(make_loop(fail, retries=1))
    assert trajectory.stop_reason == StopReason.ENV_ERROR and trajectory.metrics["attempts"] == 2


def test_a_retry_starts_from_the_beginning(make_loop, run_episode, stepping, counting):
    def step(self, response, truth):
        if len(counting.made) == 1 and response == "b":
            fail()
        return 1.0, "more", False

    trajectory = run_episode(make_loop(stepping(step), retries=1))
    assert trajectory.stop_reason == StopReason.MAX_TURNS and trajectory.error is None and trajectory.trainable
    assert [t.text for t in trajectory.turns] == ["a", "b", "c"] and trajectory.metrics["attempts"] == 2
    assert closed(counting) == [1, 1]


def test_retried_attempts_are_logged(make_loop, run_episode, stepping, counting, caplog):
    caplog.set_level("INFO", "mtrl")
    environment = stepping(lambda self, *_: fail() if len(counting.made) == 1 else (1.0, None, True))
    run_episode(make_loop(environment, retries=1))
    assert "episode g/0, attempt 1 failed: ValueError: the well is dry" in caplog.text and "in fail" in caplog.text


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_hanging_call_times_out(make_loop, run_episode, stepping, counting, where):
    free = threading.Event()
    environment = stepping(**{where: lambda *_: free.wait()})
    trajectory = run_episode(make_loop(environment, step_timeout=0.05, retries=1))
    free.set()
    assert trajectory.stop_reason == StopReason.TIMEOUT and not trajectory.trainable
    assert "took longer than environment.step_timeout=0.05 s" in trajectory.error.splitlines()[0]
    assert trajectory.metrics["attempts"] == 2 and closed(counting) == [1, 1]


def test_an_environment_created_too_late_is_closed(make_loop, run_episode, counting):
    free = threading.Event()

    def make():
        free.wait()
        return counting()

    trajectory = run_episode(make_loop(make, step_timeout=0.05))
    assert trajectory.stop_reason == StopReason.TIMEOUT and counting.made == []
    free.set()
    deadline = time.monotonic() + 10
    while closed(counting) != [1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert closed(counting) == [1]


def test_the_episode_timeout(make_loop, run_episode, stepping, counting):
    free = threading.Event()
    loop = make_loop(stepping(lambda *_: free.wait()), step_timeout=30, episode_timeout=0.05)
    trajectory = run_episode(loop)
    free.set()
    assert trajectory.stop_reason == StopReason.TIMEOUT and closed(counting) == [1]
    assert trajectory.error.splitlines()[0].endswith("the episode took longer than environment.episode_timeout=0.05 s")
    assert [t.text for t in trajectory.turns] == ["a"], "finished turns are kept"


def test_hanging_episodes_do_not_exhaust_the_threads(make_loop, run_episode, stepping):
    """Four threads, eight episodes that hang past their own limit, and then one that does not."""
    free = threading.Event()
    hangs = [True]
    environment = stepping(lambda *_: free.wait() if hangs else (1.0, None, True))
    loop = make_loop(environment, step_timeout=30, episode_timeout=0.03)
    for _ in range(8):
        assert run_episode(loop).stop_reason == StopReason.TIMEOUT
    hangs.clear()
    assert run_episode(loop).stop_reason == StopReason.DONE
    free.set()


def test_a_timeout_error_of_an_environment_is_an_error(make_loop, run_episode, stepping):
    def step(self, response, truth):
        raise TimeoutError("the database did not answer")

    trajectory = run_episode(make_loop(stepping(step)))
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert trajectory.error.splitlines()[0] == "TimeoutError: the database did not answer"


def test_an_unparsable_response_is_a_parse_error(make_loop, run_episode, counting, tiny_codec, monkeypatch):
    monkeypatch.setattr(tiny_codec.renderer, "parse_response", fail)
    trajectory = run_episode(make_loop(counting))
    assert trajectory.stop_reason == StopReason.PARSE_ERROR and not trajectory.trainable
    assert "ResponseParseError: the renderer could not parse" in trajectory.error.splitlines()[0]
    assert "the well is dry" in trajectory.error and closed(counting) == [1]


def test_an_error_with_unpaired_surrogates_can_be_written(make_loop, run_episode, stepping, tmp_path):
    from mtrl.types import write_jsonl

    def step(self, response, truth):
        raise ValueError("bad \ud800 text")

    trajectory = run_episode(make_loop(stepping(step)))
    write_jsonl(tmp_path / "t.jsonl", [trajectory])
    assert "bad ? text" in trajectory.error


# -- results of step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, r"Env.step returned None; it must return \(reward, observation, done\) or a StepResult"),
        ((1.0, "x"), r"Env.step returned \(1.0, 'x'\); it must return"),
        ((1.0, "x", True, {}), r"it must return \(reward, observation, done\)"),
        ("12x", "Env.step returned '12x'; it must return"),
        ((None, "x", True), "Env.step returned the reward None; it must be a finite number"),
        (("1", "x", True), "Env.step returned the reward '1'; it must be a finite number"),
        ((float("nan"), "x", True), "Env.step returned the reward nan; it must be a finite number"),
        ((float("inf"), "x", True), "Env.step returned the reward inf; it must be a finite number"),
        ((1e50, "x", True), r"Env.step returned the reward 1e\+50; it must be a finite number below 1e\+12"),
        (StepResult(1.0, components={"part": -1e12}), r"components\['part'\] = -1000000000000.0; it must be a finite"),
        ((1.0, "x", None), "Env.step returned done=None; it must be True or False"),
        (StepResult(1.0, done=True, truncated="no"), "Env.step returned truncated='no'; it must be True or False"),
        ((1.0, True, "x"), "Env.step returned done='x'; it must be True or False"),
        (StepResult("a", None), "Env.step returned the reward 'a'"),
        (
            StepResult(1.0, components={"part": None}),
            r"returned components\['part'\] = None; it must be a finite number",
        ),
        (StepResult(1.0, metrics={"m": float("nan")}), r"returned metrics\['m'\] = nan; it must be a finite number"),
        ((1.0, 5, False), "the observation is 5; it must be text, a message, a list of messages or None"),
        ((1.0, ["x"], False), "an observation holds 'x'; messages are dicts with role and content"),
        ((1.0, {"content": "x"}, False), "an observation holds .*; messages are dicts with role and content"),
        (
            (1.0, {"role": "hacker", "content": "x"}, False),
            "an observation has the role 'hacker'; it must be one of system, user, assistant, tool",
        ),
        ((1.0, {"role": "user", "content": {1, 2}}, False), "set is not JSON serializable"),
    ],
)
def test_invalid_step_results_are_reported_and_fail_the_episode(
    make_loop, run_episode, stepping, counting, value, sentence
):
    trajectory = run_episode(make_loop(stepping(lambda *_: value)))
    assert trajectory.stop_reason == StopReason.ENV_ERROR and closed(counting) == [1]
    with pytest.raises(TypeError, match=sentence) as caught:
        as_messages(as_step_result(value, stepping()()).observation)
    assert trajectory.error.splitlines()[0] == f"TypeError: {caught.value}"


def test_numpy_numbers_become_floats(make_loop, stepping):
    value = (np.float32(0.5), None, np.bool_(True))
    result = as_step_result(value, stepping()())
    assert (type(result.reward), type(result.done)) == (float, bool) and result.reward == 0.5
    given = StepResult(True, None, 1, {"p": np.int64(2)}, {"m": np.float64(1)}, truncated=np.bool_(True))
    parts = as_step_result(given, stepping()())
    assert parts == StepResult(1.0, None, True, {"p": 2.0}, {"m": 1.0}, truncated=True)
    assert type(parts.components["p"]) is float and type(parts.truncated) is bool


def test_observations_become_messages():
    message = {"role": "tool", "content": "46", "tool_call_id": "1"}
    assert as_messages(None) == []
    assert as_messages("hi") == [{"role": "user", "content": "hi"}]
    assert as_messages(message) == as_messages([message]) == as_messages((message,)) == [message]
    assert as_messages(message)[0] is not message
    assert as_messages("a \ud800 b \u00e9") == [{"role": "user", "content": "a ? b \u00e9"}]
