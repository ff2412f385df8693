"""Episodes that Python functions run, over a real gateway."""

import asyncio
import sys
import time
from dataclasses import replace

import agent_functions as agents
import httpx
import pytest

from mtrl.agents.callable import CallableRunner
from mtrl.agents.loop import AgentLoop
from mtrl.agents.program import ProgramRunner
from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.episode import EpisodeLimits
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import StopReason

ROW = {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "b"}}


@pytest.fixture
def run_agent(tiny_tokenizer, tiny_codec):
    """Function `run_agent(agent, …)` that runs `episodes` episodes together; `run_agent.loop` is its last loop."""

    def run(agent, row=ROW, respond="abcdef", episodes=1, engine=None, concurrent=4, max_calls=6, **limits):
        reply = (lambda name, turn: respond[turn]) if isinstance(respond, str) else respond
        engine = engine or ScriptedEngine(reply, tiny_tokenizer)
        standard = {"max_turns": 6, "max_context_length": 200, "step_timeout": 5, "episode_timeout": 20, "retries": 0}
        standard |= limits
        calls = SessionLimits(max_calls, 4, standard["max_context_length"])
        sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)

        async def all_of_them():
            gateway = Gateway(engine, tiny_codec, calls)
            loop = run.loop = AgentLoop(
                gateway, CallableRunner(agent, concurrent), EpisodeLimits(**standard), concurrent
            )
            try:
                return await asyncio.gather(
                    *(loop.run(row, "step0/0", i, replace(sampling, seed=i)) for i in range(episodes))
                )
            finally:
                await loop.close()

        finished = asyncio.run(asyncio.wait_for(all_of_them(), 60))
        return finished[0] if episodes == 1 else finished

    return run


@pytest.mark.parametrize("agent", [agents.guess, agents.aguess], ids=["sync", "async"])
def test_a_function_runs_an_episode(run_agent, agent):
    trajectory = run_agent(agent)
    assert trajectory.error is None and trajectory.stop_reason == StopReason.DONE and trajectory.trainable
    assert [turn.text for turn in trajectory.turns] == ["a", "b"]
    assert trajectory.rewards == [0.0, 1.0] and trajectory.metrics["attempts"] == 1
    assert trajectory.metrics.get("asked") == (2.0 if agent is agents.guess else None)
    assert [turn.break_reason for turn in trajectory.turns] == [None, None]
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert run_agent.loop.sampling_clock.seconds > 0
    (sample,) = trajectory_samples(trajectory, [0.0, 1.0])
    assert sample.action_tokens == trajectory.action_tokens > 0


def test_rewards_per_turn(run_agent):
    assert run_agent(agents.rewards_per_turn, {**ROW, "rewards": [0.5, 0, 1]}).rewards == [0.5, 0.0, 1.0]
    assert run_agent(agents.rewards_per_turn, {**ROW, "rewards": 2}).rewards == [0.0, 0.0, 2.0]


def test_rewards_that_do_not_fit_fail_the_episode(run_agent):
    trajectory = run_agent(agents.rewards_per_turn, {**ROW, "rewards": [1.0, 1.0]})
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
    assert trajectory.error.startswith("AgentError: the program's rewards do not fit")


@pytest.mark.parametrize(
    ("agent", "report", "turns"),
    [
        (agents.fails, "LookupError: no such tool\n", 1),
        (agents.reports_failure, "AgentError: no disk\n", 1),
        (agents.returns_no_reward, "MissingRewardError: the program ended without a reward; let it return one", 1),
        (agents.never_calls, "AgentError: the program never called the model at http://", 0),
        (agents.fails_at_once, "AgentError: the program never called the model", 0),
        (agents.blocks, "AgentError: the program never called the model", 0),
    ],
)
def test_failures_of_an_episode(run_agent, agent, report, turns):
    trajectory = run_agent(agent, retries=1)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
    assert trajectory.error.startswith(report) and len(trajectory.turns) == turns
    assert trajectory.metrics["attempts"] == 2
    assert ("LookupError: no such tool" in trajectory.error) == agent.__name__.startswith("fails")
    assert ("await client.achat" in trajectory.error) == (agent is agents.blocks)


def test_a_command_that_fails_before_its_first_call_is_reported(tiny_tokenizer, tiny_codec, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text("import no_such_package")
    gateway = Gateway(ScriptedEngine(lambda name, turn: "b", tiny_tokenizer), tiny_codec, SessionLimits(4, 4, 200))
    loop = AgentLoop(gateway, ProgramRunner([sys.executable, str(program)], {}, 1), EpisodeLimits(4, 200, 5, 20, 0), 1)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)

    async def one():
        try:
            return await loop.run(ROW, "g", 0, sampling)
        finally:
            await loop.close()

    first_line = asyncio.run(asyncio.wait_for(one(), 60)).error.partition("\n")[0]
    assert first_line.startswith("AgentError: the program never called the model")
    assert first_line.endswith("ended with status 1: ModuleNotFoundError: No module named 'no_such_package')")


def test_a_retry_starts_without_earlier_turns(run_agent):
    attempts = []

    def once_broken(row, client):
        row["ground_truth"]["seen"] = True
        attempts.append((client.api_key, dict(row["ground_truth"])))
        client.chat(row["prompt"])
        if len(attempts) == 1:
            row["ground_truth"].clear()
            raise LookupError
        return 1.0

    trajectory = run_agent(once_broken, retries=1)
    assert trajectory.stop_reason == StopReason.DONE and trajectory.metrics["attempts"] == 2
    assert len(trajectory.turns) == 1 and trajectory.reward == 1.0
    assert attempts[0][0] != attempts[1][0] and attempts[0][1] == attempts[1][1]


@pytest.mark.parametrize("agent", [agents.hangs, agents.ahangs], ids=["sync", "async"])
def test_a_time_limit_ends_the_episode(run_agent, agent):
    begun = time.monotonic()
    trajectory = run_agent(agent, episode_timeout=1)
    assert trajectory.stop_reason == StopReason.TIMEOUT and len(trajectory.turns) == 1
    assert "the episode took longer than environment.episode_timeout=1 s" in trajectory.error
    assert time.monotonic() - begun < 20


def test_waiting_for_a_slot_does_not_count_as_episode_time(run_agent):
    finished = run_agent(agents.Together(), episodes=6, concurrent=1, episode_timeout=5)
    assert [t.stop_reason for t in finished] == [StopReason.DONE] * 6


def test_concurrent_programs_are_limited(run_agent):
    agent = agents.Together()
    finished = run_agent(agent, episodes=9, concurrent=3)
    assert agent.most == 3 and [t.index for t in finished] == list(range(9))
    assert all(t.stop_reason == StopReason.DONE and t.reward == 1.0 for t in finished)


def test_the_call_limit_is_the_stop_reason(run_agent):
    trajectory = run_agent(agents.calls_forever, max_calls=3)
    assert trajectory.stop_reason == StopReason.MAX_TURNS and trajectory.error is None and trajectory.trainable
    assert len(trajectory.turns) == 3 and trajectory.reward == 0.0


def test_the_context_limit_is_the_stop_reason(run_agent):
    trajectory = run_agent(agents.calls_forever, respond=lambda name, turn: "a", max_context_length=60, max_calls=50)
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.error is None
    assert 1 < len(trajectory.turns) < 50 and trajectory.contexts[-1] < 60


@pytest.mark.parametrize("crashes", [False, True])
def test_a_refused_count_of_tokens_is_not_the_stop_reason(run_agent, crashes):
    def counts(row, client):
        client.chat(row["prompt"])
        body = {"model": "m", "messages": [{"role": "user", "content": "ab" * 10_000}]}
        headers = {"x-api-key": client.api_key}
        answer = httpx.post(f"{client.base_url}/messages/count_tokens", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 400 and "maximum context length" in answer.text
        if crashes:
            raise LookupError("no such tool")
        return 1.0

    trajectory = run_agent(counts)
    assert trajectory.stop_reason == (StopReason.ENV_ERROR if crashes else StopReason.DONE)
    assert trajectory.trainable != crashes and len(trajectory.turns) == 1


class Lost(ScriptedEngine):
    """An engine that is lost at the second turn."""

    async def generate(self, trajectory_id, prompt, sampling):
        if self._turns[trajectory_id] == 1:
            raise EngineLostError("the servers are gone")
        return await super().generate(trajectory_id, prompt, sampling)


@pytest.mark.parametrize("agent", [agents.guess, agents.aguess], ids=["sync", "async"])
def test_a_lost_engine_ends_the_run(run_agent, tiny_tokenizer, agent):
    with pytest.raises(EngineLostError, match="the servers are gone"):
        run_agent(agent, engine=Lost(lambda name, turn: "a", tiny_tokenizer))


def test_a_lost_engine_ends_the_run_even_if_the_program_continues(run_agent, tiny_tokenizer):
    def stubborn(row, client):
        messages = [*row["prompt"], client.chat(row["prompt"]), {"role": "user", "content": "go on"}]
        try:
            client.chat(messages)
        finally:
            time.sleep(600)

    with pytest.raises(EngineLostError):
        run_agent(stubborn, engine=Lost(lambda name, turn: "a", tiny_tokenizer))


def test_a_reported_reward_counts_if_none_is_returned(run_agent):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        httpx.post(f"{root}/update-reward", json={"rewards": [0.25]}, trust_env=False).raise_for_status()
        return row.get("returned")

    assert run_agent(reports).reward == 0.25
    assert run_agent(reports, {**ROW, "returned": 0.75}).reward == 0.75


def test_reported_rewards_that_overflow_are_refused(run_agent):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        answer = httpx.post(f"{root}/update-reward", json={"rewards": [1e300]}, trust_env=False)
        assert answer.status_code == 400

    trajectory = run_agent(reports)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable


def test_invalid_reports_after_a_refusal_fail_the_episode(run_agent):
    def reports(row, client):
        with pytest.raises(Exception, match="429"):
            for _ in range(50):
                client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        answer = httpx.post(f"{root}/update-reward", json={"rewards": [1e308]}, trust_env=False)
        assert answer.status_code == 400

    assert run_agent(reports).reward == 0.0


def test_a_reported_failure_fails_the_episode(run_agent):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        body = {"status": "failed", "error": "no disk"}
        httpx.post(f"{root}/complete-rollout", json=body, trust_env=False).raise_for_status()

    trajectory = run_agent(reports)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and trajectory.error.startswith("AgentError: no disk\n")


def test_the_error_of_the_client_has_the_reason(run_agent):
    from mtrl.agents.client import RefusedError

    seen = []

    def curious(row, client):
        client.chat(row["prompt"])
        for options in ({"max_tokens": "many"}, {"response_format": {"type": "json_object"}}):
            with pytest.raises(RefusedError) as error:
                client.chat(row["prompt"], **options)
            seen.append(error.value)
        return 1.0

    assert run_agent(curious).reward == 1.0
    assert [error.status for error in seen] == [400, 400] and "max_tokens" in str(seen[0])


def test_openai_clients_of_the_agent_client(run_agent):
    pytest.importorskip("openai")

    def ask(row, client):
        with client.openai() as openai:
            answer = openai.chat.completions.create(model=client.model, messages=row["prompt"])
        return float(answer.choices[0].message.content == "a")

    async def ask_async(row, client):
        async with client.async_openai() as openai:
            answer = await openai.chat.completions.create(model=client.model, messages=row["prompt"])
        return float(answer.choices[0].message.content == "a")

    assert [run_agent(agent).reward for agent in (ask, ask_async)] == [1.0, 1.0]


def test_agents_run_on_consecutive_event_loops(tiny_tokenizer, tiny_codec):
    """An evaluation may run its episodes in an event loop of its own."""
    engine = ScriptedEngine(lambda name, turn: "b", tiny_tokenizer)
    gateway = Gateway(engine, tiny_codec, SessionLimits(4, 4, 200))
    loop = AgentLoop(gateway, CallableRunner(agents.aguess, 2), EpisodeLimits(4, 200, 5, 20, 0), 2)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)
    for _ in range(2):
        assert asyncio.run(loop.run(ROW, "g", 0, sampling)).reward == 1.0
    asyncio.run(loop.close())
