"""Episodes of gsm8k: turns, feedback, the calculator's turn, and isolation."""

import pytest

from envs.gsm8k import prompts
from envs.gsm8k.environment import Gsm8kEnv
from mtrl.errors import UserError

TRUTH = {"answer": "72"}


def test_right_at_once_ends_the_episode():
    result = Gsm8kEnv().step("6*12 is 72\n#### 72", TRUTH)
    assert (result.reward, result.observation, result.done) == (1.0, None, True)
    assert result.components == {"correct": 1.0, "format": 0.0}


def test_feedback_until_the_turns_are_used():
    env = Gsm8kEnv(max_turns=3)
    results = [env.step("#### 1", TRUTH) for _ in range(3)]
    assert [result.observation for result in results] == [prompts.REASON, prompts.LAST_TURN, None]
    assert [result.done for result in results] == [False, False, True]
    assert prompts.LAST_TURN == "Now provide only the final numeric answer in the exact format: '#### ANSWER'."


def test_synthetic_rows_get_short_feedback(row):
    env = Gsm8kEnv(max_turns=3)
    env.reset({**row, "source": "synthetic"})
    assert env.step("#### 1", TRUTH).observation == "wrong, try again"
    malformed = env.step("72", TRUTH)
    assert malformed.observation == prompts.NO_ANSWER
    assert malformed.metrics["malformed"] == 1.0


def test_a_calculation_takes_a_turn_and_has_no_reward():
    env = Gsm8kEnv(max_turns=3, calculator=True)
    result = env.step("<calc>6*12</calc>", TRUTH)
    assert (result.reward, result.observation, result.done) == (0.0, "72", False)
    assert result.metrics == {"calc_calls": 1.0, "calc_errors": 0.0, "malformed": 0.0}
    assert env.step("#### 72", TRUTH).reward == 1.0


@pytest.mark.parametrize(
    ("response", "observation"),
    [
        ("<calc>1/0</calc>", "error: division by zero"),
        ("<calc>1</calc><calc>2</calc>", "error: write one <calc>expression</calc>"),
        ("<calc>6*12", "error: write one <calc>expression</calc>"),
    ],
)
def test_calculator_errors_are_text(response, observation):
    result = Gsm8kEnv(calculator=True).step(response, TRUTH)
    assert (result.reward, result.observation, result.done) == (0.0, observation, False)
    assert result.metrics["calc_errors"] == 1.0


def test_a_calculation_in_the_last_turn_ends_the_episode():
    env = Gsm8kEnv(max_turns=2, calculator=True)
    env.step("#### 1", TRUTH)
    result = env.step("<calc>6*12</calc>", TRUTH)
    assert (result.reward, result.observation, result.done) == (0.0, None, True)


@pytest.mark.parametrize(
    ("last", "truncated"), [("#### 1", False), ("#### 72", False), ("<calc>1+1</calc>", True), ("hm", True)]
)
def test_completion_is_an_answer_right_or_wrong(last, truncated):
    env = Gsm8kEnv(max_turns=2, calculator=True)
    assert not env.step("#### 1", TRUTH).truncated
    result = env.step(last, TRUTH)
    assert result.done and result.truncated is truncated


def test_an_answer_beside_a_calculation_is_an_answer():
    assert Gsm8kEnv(calculator=True).step("<calc>6*12</calc> #### 72", TRUTH).reward == 1.0


def test_without_the_calculator_its_tag_is_text():
    result = Gsm8kEnv().step("<calc>6*12</calc>", TRUTH)
    assert result.observation == prompts.REASON
    assert result.metrics["malformed"] == 1.0


@pytest.mark.parametrize(("scheme", "total"), [("default", 1.0), ("guide", 1.08)])
def test_wrong_then_right_through_the_environment(scheme, total, row, play_responses):
    trajectory = play_responses(row, ["#### 1", "#### 2", "#### 72"], reward=scheme)
    assert trajectory.reward == pytest.approx(total)


def test_reset_starts_a_new_episode(row):
    env = Gsm8kEnv(max_turns=2)
    env.step("#### 1", TRUTH)
    env.reset(row)
    assert env.step("#### 72", TRUTH).reward == 1.0
    assert env.current_turn == 1


@pytest.mark.parametrize(("scheme", "reward"), [("default", 0.0), ("guide", 0.2)])
def test_the_last_turn_and_a_single_turn(scheme, reward):
    result = Gsm8kEnv(max_turns=1, reward=scheme).step("#### 1", TRUTH)
    assert (result.reward, result.done) == (reward, True)


def test_a_single_turn_gets_the_single_turn_prompt():
    row = {"id": "0", "question": "6*12?", "prompt": prompts.opening("6*12?", True, False), "ground_truth": TRUTH}
    assert Gsm8kEnv(max_turns=1).reset(row) == [{"role": "user", "content": "6*12?" + prompts.SINGLE_TURN}]
    assert Gsm8kEnv(max_turns=2).reset(row) is None
    own_prompt = {**row, "prompt": [{"role": "user", "content": "mine"}]}
    assert Gsm8kEnv(max_turns=1).reset(own_prompt) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, r"generator\.max_turns=0"),
        ({"max_turns": 1, "calculator": True}, r"calculator=true needs a turn to compute"),
        ({"reward": "x"}, r"reward\.scheme=x"),
        ({"calculator": "no"}, r"config\.calculator='no' must be true or false; write .*\.calculator=false$"),
        ({"calculator": "off"}, r"config\.calculator='off' must be true or false; write .*\.calculator=false$"),
        ({"calculator": "on"}, r"config\.calculator='on' must be true or false; write .*\.calculator=true$"),
        ({"calculator": 0}, r"config\.calculator=0 must be true or false"),
        ({"calculator": None}, r"config\.calculator=None must be true or false"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        Gsm8kEnv(**settings)


def test_a_ground_truth_without_a_number():
    with pytest.raises(UserError, match="has no number under 'answer'"):
        Gsm8kEnv().step("#### 72", {"target": "72"})
