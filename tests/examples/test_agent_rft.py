"""The agent with the SDK of the managed service, unchanged: its decorator reports to the gateway instead of AWS."""

import pytest

from examples.agents.word_problems import FAMILY
from mtrl.agents.remote import RemoteRunner
from mtrl.types import StopReason
from tests.examples.agent_episodes import by_agent, by_environment, served, tokens


@pytest.fixture
def module():
    from examples.agents import rft_agent

    return rft_agent


@pytest.fixture
def agent(module, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    with served(module.app) as url:
        yield url


def test_the_agent_gives_tokens_and_rewards_of_the_native_loop(row, agent, tiny_codec):
    for responses in (FAMILY.gold(row), ["#### 1"]):
        trajectory = by_agent(RemoteRunner(agent, "MTRL_NO_KEY"), row, responses, tiny_codec)
        native = by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
        assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.DONE)
        assert trajectory.reward == native.reward == FAMILY.score(trajectory, row)
        assert tokens(trajectory) == tokens(native)


def test_an_error_of_the_agent_fails_the_episode(row, agent, module, tiny_codec, monkeypatch):
    def broken(*_):
        raise RuntimeError("the tool failed")

    monkeypatch.setattr(module, "solve", broken)
    trajectory = by_agent(RemoteRunner(agent, "MTRL_NO_KEY"), row, ["#### 1"], tiny_codec)
    assert (trajectory.stop_reason, trajectory.trainable) == (StopReason.ENV_ERROR, False)
