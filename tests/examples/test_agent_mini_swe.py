"""mini-swe-agent, unchanged, gives the tokens and scores of the native loop."""

import pytest

from envs import mini_swe
from examples.agents import mini_swe_agent
from examples.agents.mini_swe_agent import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.config.schema import DataConfig
from mtrl.types import StopReason
from tests.examples.agent_episodes import by_agent, by_environment, tokens

pytestmark = pytest.mark.xdist_group("mini_swe_agent")  # one worker imports the package, which takes seconds


@pytest.fixture(scope="module")
def row():
    return FAMILY.load(DataConfig(synthetic_train_rows=8, synthetic_test_rows=2), seed=0, command_seconds=10).train[0]


def called(row, responses, codec):
    return by_agent(CallableRunner(mini_swe_agent.run, 2), row, responses, codec)


def bash(command):
    return f"```bash\n{command}\n```"


def test_the_agent_uses_the_classes_of_the_package(row):
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    class Client:
        base_url, api_key, model = "http://127.0.0.1:9/v1", "sk", "m"

    agent = mini_swe_agent.make_agent(row, Client, task=None)
    assert (type(agent), type(agent.model)) == (DefaultAgent, LitellmTextbasedModel)


def test_the_agent_repairs_a_row(row, tiny_codec):
    trajectory = called(row, FAMILY.gold(row), tiny_codec)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.DONE)
    assert (trajectory.reward, FAMILY.score(trajectory, row)) == (1.0, 1.0)
    assert trajectory.metrics["submitted"] == 1.0
    native = by_environment(FAMILY, row, FAMILY.gold(row), tiny_codec, max_turns=3)
    assert native.reward == 1.0 and len(native.turns) == 2
    assert tokens(trajectory) == tokens(native)


def test_long_output_and_failures_are_observed_as_in_the_native_loop(row, tiny_codec):
    responses = [bash("seq 500; exit 3"), bash("echo no >&2; false"), bash("cat f.py")]
    agent, native = called(row, responses, tiny_codec), by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
    assert tokens(agent) == tokens(native) and len(native.turns) == 3
    assert " ... " in agent.messages[3]["content"] and agent.messages[3]["content"].startswith("3 ; ")
    assert (agent.reward, FAMILY.score(agent, row)) == (0.0, 0.0)


def test_only_submitted_repairs_are_rewarded(row, tiny_codec):
    look, repair = FAMILY.gold(row)
    undone = repair.replace(" && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "")
    trajectory = called(row, [look, undone, look], tiny_codec)
    assert (trajectory.reward, FAMILY.score(trajectory, row)) == (0.0, 0.0)
    for decoy in FAMILY.decoys(row)[-2:]:
        trajectory = called(row, [decoy], tiny_codec)
        assert (trajectory.reward, FAMILY.score(trajectory, row)) == (0.0, 0.0)


def test_a_response_without_a_command_starts_a_new_sample(row, tiny_codec):
    """mini-swe-agent drops the response from its messages and requests another, which starts a new sample."""
    look, repair = FAMILY.gold(row)
    trajectory = called(row, [look, "no command", repair], tiny_codec)
    assert [turn.text for turn in trajectory.turns] == [look, "no command", repair]
    assert [turn.break_reason for turn in trajectory.turns] == [None, None, "branch"]
    assert trajectory.turns[2].observation[-1]["content"] == "write one command"
    assert (trajectory.reward, FAMILY.score(trajectory, row)) == (1.0, 1.0)


def test_rows_equal_those_of_the_family_with_a_system_message():
    data = DataConfig(synthetic_train_rows=4, synthetic_test_rows=2)
    ours, theirs = FAMILY.load(data, 0), mini_swe.load(data, 0)
    assert [row["prompt"][1:] for row in ours.train] == [row["prompt"] for row in theirs.train]
    assert {row["prompt"][0]["role"] for row in (*ours.train, *ours.test)} == {"system"}
    full = FAMILY.load(data, 0, prompt="full")
    assert [row["prompt"] for row in full.train] == [
        row["prompt"] for row in mini_swe.load(data, 0, prompt="full").train
    ]
