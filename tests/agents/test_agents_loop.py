"""Episodes that Python functions play, over a real gateway."""

import asyncio
import sys
import time
from dataclasses import replace

import agents_to_play as agents
import httpx
import pytest

from mtrl.agents.callable import CallableRunner
from mtrl.agents.loop import AgentLoop
from mtrl.agents.program import ProgramRunner
from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.episode import Limits
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import StopReason

ROW = {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "b"}}


@pytest.fixture
def play(tiny_tokenizer, tiny_codec):
    """`play(agent, …)`: one episode, or `episodes` of them at once; the last loop is `play.loop`."""

    def run(agent, row=ROW, respond="abcdef", episodes=1, engine=None, concurrent=4, max_calls=6, **limits):
        said = (lambda name, turn: respond[turn]) if isinstance(respond, str) else respond
        engine = engine or ScriptedEngine(said, tiny_tokenizer)
        standard = {"max_turns": 6, "max_context_length": 200, "step_timeout": 5, "episode_timeout": 20, "retries": 0}
        standard |= limits
        calls = SessionLimits(max_calls, 4, standard["max_context_length"])
        sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)

        async def all_of_them():
            gateway = Gateway(engine, tiny_codec, calls)
            loop = run.loop = AgentLoop(gateway, CallableRunner(agent, concurrent), Limits(**standard), concurrent)
            try:
                return await asyncio.gather(
                    *(loop.run(row, "step0/0", i, replace(sampling, seed=i)) for i in range(episodes))
                )
            finally:
                await loop.close()

        played = asyncio.run(asyncio.wait_for(all_of_them(), 60))
        return played[0] if episodes == 1 else played

    return run


@pytest.mark.parametrize("agent", [agents.guess, agents.aguess], ids=["sync", "async"])
def test_a_function_plays_an_episode(play, agent):
    trajectory = play(agent)
    assert trajectory.error is None and trajectory.stop_reason == StopReason.DONE and trajectory.trainable
    assert [turn.text for turn in trajectory.turns] == ["a", "b"]
    assert trajectory.rewards == [0.0, 1.0] and trajectory.metrics["attempts"] == 1
    assert trajectory.metrics.get("asked") == (2.0 if agent is agents.guess else None)
    assert [turn.break_reason for turn in trajectory.turns] == [None, None]
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert play.loop.sampling.seconds > 0
    (sample,) = trajectory_samples(trajectory, [0.0, 1.0])
    assert sample.action_tokens == trajectory.action_tokens > 0


def test_rewards_of_turns(play):
    assert play(agents.pays_per_turn, {**ROW, "rewards": [0.5, 0, 1]}).rewards == [0.5, 0.0, 1.0]
    assert play(agents.pays_per_turn, {**ROW, "rewards": 2}).rewards == [0.0, 0.0, 2.0]


def test_rewards_that_do_not_fit_fail_the_episode(play):
    trajectory = play(agents.pays_per_turn, {**ROW, "rewards": [1.0, 1.0]})
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
    assert trajectory.error.startswith("AgentError: the program's rewards do not fit")


@pytest.mark.parametrize(
    ("agent", "told", "turns"),
    [
        (agents.breaks, "LookupError: no such tool\n", 1),
        (agents.says_it_failed, "AgentError: no disk\n", 1),
        (agents.unpaid, "MissingRewardError: the program ended without a reward; let it return one", 1),
        (agents.never_asks, "AgentError: the program never called the model, which it was told to ask at http://", 0),
        (agents.breaks_at_once, "AgentError: the program never called the model", 0),
        (agents.blocks, "AgentError: the program never called the model", 0),
    ],
)
def test_what_fails_an_episode(play, agent, told, turns):
    trajectory = play(agent, retries=1)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
    assert trajectory.error.startswith(told) and len(trajectory.turns) == turns
    assert trajectory.metrics["attempts"] == 2
    assert ("LookupError: no such tool" in trajectory.error) == ("break" in agent.__name__)
    assert ("await client.achat" in trajectory.error) == (agent is agents.blocks)


def test_a_command_that_breaks_before_it_asks_says_why(tiny_tokenizer, tiny_codec, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text("import no_such_package")
    gateway = Gateway(ScriptedEngine(lambda name, turn: "b", tiny_tokenizer), tiny_codec, SessionLimits(4, 4, 200))
    loop = AgentLoop(gateway, ProgramRunner([sys.executable, str(program)], {}, 1), Limits(4, 200, 5, 20, 0), 1)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)

    async def one():
        try:
            return await loop.run(ROW, "g", 0, sampling)
        finally:
            await loop.close()

    first_line = asyncio.run(asyncio.wait_for(one(), 60)).error.partition("\n")[0]
    assert first_line.startswith("AgentError: the program never called the model")
    assert first_line.endswith("ended with status 1: ModuleNotFoundError: No module named 'no_such_package')")


def test_a_fresh_attempt_has_no_memory_of_the_last(play):
    attempts = []

    def once_broken(row, client):
        row["ground_truth"]["seen"] = True
        attempts.append((client.api_key, dict(row["ground_truth"])))
        client.chat(row["prompt"])
        if len(attempts) == 1:
            row["ground_truth"].clear()
            raise LookupError
        return 1.0

    trajectory = play(once_broken, retries=1)
    assert trajectory.stop_reason == StopReason.DONE and trajectory.metrics["attempts"] == 2
    assert len(trajectory.turns) == 1 and trajectory.reward == 1.0
    assert attempts[0][0] != attempts[1][0] and attempts[0][1] == attempts[1][1]


@pytest.mark.parametrize("agent", [agents.hangs, agents.ahangs], ids=["sync", "async"])
def test_a_time_limit_ends_the_episode(play, agent):
    begun = time.monotonic()
    trajectory = play(agent, episode_timeout=1)
    assert trajectory.stop_reason == StopReason.TIMEOUT and len(trajectory.turns) == 1
    assert "the episode took longer than environment.episode_timeout=1 s" in trajectory.error
    assert time.monotonic() - begun < 20


def test_time_that_is_waited_for_a_slot_is_not_the_episodes(play):
    played = play(agents.Together(), episodes=6, concurrent=1, episode_timeout=5)
    assert [t.stop_reason for t in played] == [StopReason.DONE] * 6


def test_no_more_programs_run_at_once_than_may(play):
    agent = agents.Together()
    played = play(agent, episodes=9, concurrent=3)
    assert agent.most == 3 and [t.index for t in played] == list(range(9))
    assert all(t.stop_reason == StopReason.DONE and t.reward == 1.0 for t in played)


def test_a_program_that_ends_because_it_may_ask_no_more(play):
    trajectory = play(agents.asks_without_end, max_calls=3)
    assert trajectory.stop_reason == StopReason.MAX_TURNS and trajectory.error is None and trajectory.trainable
    assert len(trajectory.turns) == 3 and trajectory.reward == 0.0


def test_a_program_that_ends_because_the_context_is_full(play):
    trajectory = play(agents.asks_without_end, respond=lambda name, turn: "a", max_context_length=60, max_calls=50)
    assert trajectory.stop_reason == StopReason.CONTEXT_LIMIT and trajectory.error is None
    assert 1 < len(trajectory.turns) < 50 and trajectory.contexts[-1] < 60


class Lost(ScriptedEngine):
    """Is lost at the second turn."""

    async def generate(self, trajectory_id, prompt, sampling):
        if self._turns[trajectory_id] == 1:
            raise EngineLostError("the servers are gone")
        return await super().generate(trajectory_id, prompt, sampling)


@pytest.mark.parametrize("agent", [agents.guess, agents.aguess], ids=["sync", "async"])
def test_a_lost_engine_ends_the_run(play, tiny_tokenizer, agent):
    with pytest.raises(EngineLostError, match="the servers are gone"):
        play(agent, engine=Lost(lambda name, turn: "a", tiny_tokenizer))


def test_a_lost_engine_ends_the_run_whatever_the_program_does_then(play, tiny_tokenizer):
    def stubborn(row, client):
        messages = [*row["prompt"], client.chat(row["prompt"]), {"role": "user", "content": "go on"}]
        try:
            client.chat(messages)
        finally:
            time.sleep(600)

    with pytest.raises(EngineLostError):
        play(stubborn, engine=Lost(lambda name, turn: "a", tiny_tokenizer))


def test_a_report_over_http_pays_where_nothing_is_returned(play):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        httpx.post(f"{root}/update-reward", json={"rewards": [0.25]}, trust_env=False).raise_for_status()
        return row.get("returned")

    assert play(reports).reward == 0.25
    assert play(reports, {**ROW, "returned": 0.75}).reward == 0.75


def test_a_report_of_more_than_numbers_can_sum(play):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        answer = httpx.post(f"{root}/update-reward", json={"rewards": [1e300]}, trust_env=False)
        assert answer.status_code == 400

    trajectory = play(reports)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable


def test_a_report_of_an_agent_that_was_refused_before_is_not_taken_either(play):
    def reports(row, client):
        with pytest.raises(Exception, match="429"):
            for _ in range(50):
                client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        answer = httpx.post(f"{root}/update-reward", json={"rewards": [1e308]}, trust_env=False)
        assert answer.status_code == 400

    assert play(reports).reward == 0.0


def test_a_program_that_reports_its_failure(play):
    def reports(row, client):
        client.chat(row["prompt"])
        root = client.base_url.removesuffix("/v1")
        body = {"status": "failed", "error": "no disk"}
        httpx.post(f"{root}/complete-rollout", json=body, trust_env=False).raise_for_status()

    trajectory = play(reports)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and trajectory.error.startswith("AgentError: no disk\n")


def test_the_client_tells_why_it_is_refused(play):
    from mtrl.agents.client import RefusedError

    seen = []

    def curious(row, client):
        client.chat(row["prompt"])
        for options in ({"max_tokens": "many"}, {"response_format": {"type": "json_object"}}):
            with pytest.raises(RefusedError) as error:
                client.chat(row["prompt"], **options)
            seen.append(error.value)
        return 1.0

    assert play(curious).reward == 1.0
    assert [error.status for error in seen] == [400, 400] and "max_tokens" in str(seen[0])


def test_openai_clients_of_an_agent(play):
    pytest.importorskip("openai")

    def ask(row, client):
        with client.openai() as openai:
            answer = openai.chat.completions.create(model=client.model, messages=row["prompt"])
        return float(answer.choices[0].message.content == "a")

    async def ask_async(row, client):
        async with client.async_openai() as openai:
            answer = await openai.chat.completions.create(model=client.model, messages=row["prompt"])
        return float(answer.choices[0].message.content == "a")

    assert [play(agent).reward for agent in (ask, ask_async)] == [1.0, 1.0]


def test_one_loop_after_the_other(tiny_tokenizer, tiny_codec):
    """An evaluation may play in an event loop of its own."""
    engine = ScriptedEngine(lambda name, turn: "b", tiny_tokenizer)
    gateway = Gateway(engine, tiny_codec, SessionLimits(4, 4, 200))
    loop = AgentLoop(gateway, CallableRunner(agents.aguess, 2), Limits(4, 200, 5, 20, 0), 2)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)
    for _ in range(2):
        assert asyncio.run(loop.run(ROW, "g", 0, sampling)).reward == 1.0
    asyncio.run(loop.close())
