"""Self-play: each trained role of an episode gives its own trajectory, with its own tokens only."""

import asyncio
from functools import partial

import pytest

from envs.tic_tac_toe.environment import TicTacToeEnv
from envs.tic_tac_toe.prompts import EXAMPLE_ROW
from mtrl.config.mixture import source_of
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.roles import SELF_PLAY
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits
from mtrl.rollout.failures import episode_count
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.self_play import SelfPlayLoop
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.rollout_metrics import source_metrics
from mtrl.types import StopReason

ROW = EXAMPLE_ROW | {SELF_PLAY: True}
X_WINS = [f"<move>{cell}</move>" for cell in "15293"]
"""Moves of both roles in turn; the last one completes the first line."""


class Frozen(ScriptedEngine):
    """Stands for the frozen engine, whose trajectories need no opening."""


@pytest.fixture
def play(tiny_tokenizer, tiny_codec):
    """Function `play(responses, row=ROW, frozen=None, **limits)` that returns the trajectories of one episode."""

    def play(responses, row=ROW, frozen=None, make=TicTacToeEnv, **limits):
        pool = EnvironmentPool(2)
        limits = {"max_turns": 5, "max_context_length": 400, "step_timeout": 30, "episode_timeout": 60} | limits
        loop = SelfPlayLoop(
            ScriptedEngine({"g/3": responses}, tiny_tokenizer),
            make,
            partial(Conversation, tiny_codec),
            pool,
            EpisodeLimits(**limits, retries=0),
            roles=TicTacToeEnv.roles,
            frozen=frozen and Frozen({"g/3": frozen}, tiny_tokenizer),
        )
        sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)
        found = asyncio.run(loop.run_roles(row, "g", 3, sampling))
        asyncio.run(loop.close())
        return found

    return play


def user(text):
    return {"role": "user", "content": text}


def test_each_role_has_its_own_conversation_and_reward(play, tiny_codec):
    x, o = play(X_WINS)
    assert [(t.role, t.index, t.stop_reason, t.reward) for t in (x, o)] == [
        ("x", 6, StopReason.DONE, 1.0),
        ("o", 7, StopReason.DONE, -1.0),
    ]
    assert [turn.text for turn in x.turns] == X_WINS[0::2] and [turn.text for turn in o.turns] == X_WINS[1::2]
    assert x.rewards == [0.0, 0.0, 1.0] and o.rewards == [0.0, -1.0]
    assert [turn.observation for turn in x.turns] == [[user(t)] for t in ("123/456/789", "+23/4-6/789", "++3/4-6/78-")]
    assert [turn.observation for turn in o.turns] == [[user(t)] for t in ("-23/456/789", "--3/4+6/789")]
    assert (x.final_observation, o.final_observation) == ([user("+++/4-6/78-")], [user("---/4+6/78+")])
    assert x.trainable and o.trainable and x.metrics == o.metrics == {"attempts": 1}
    for trajectory in (x, o):
        (sample,) = trajectory_samples(trajectory, [1.0] * len(trajectory.turns))
        sampled = [token for token, mine in zip(sample.token_ids, sample.loss_mask, strict=True) if mine]
        assert sampled == [token for turn in trajectory.turns for token in turn.action_ids]
        messages = [m for turn in trajectory.turns for m in [*turn.observation, turn.message]]
        whole = tiny_codec.render(messages[:-1]) + trajectory.turns[-1].action_ids
        assert sample.token_ids == whole, "the tokens are those of a conversation of this role alone"


def test_only_the_role_of_the_row_is_trained_against_frozen_weights(play):
    (o,) = play(X_WINS[1::2], ROW | {"role": "o"}, frozen=X_WINS[0::2])
    assert (o.role, o.index, o.rewards) == ("o", 3, [0.0, -1.0])
    assert [turn.text for turn in o.turns] == X_WINS[1::2]


def test_rows_of_evaluations_meet_the_fixed_opponent(play):
    (trajectory,) = play([f"<move>{cell}</move>" for cell in "519"], EXAMPLE_ROW)
    assert (trajectory.role, trajectory.rewards, trajectory.index) == (None, [0.0, 0.0, 1.0], 3)


def test_a_role_that_never_moved_is_not_trained(play):
    x, o = play(["I give up"])
    assert (x.reward, x.turns[0].metrics["invalid"], x.trainable) == (-1.0, 1.0, True)
    assert (o.turns, o.stop_reason, o.trainable) == ([], StopReason.DONE, False)


def test_a_limit_of_one_role_ends_the_episode_for_all(play):
    x, o = play(X_WINS, max_turns=2, make=lambda: TicTacToeEnv(5))
    assert [turn.text for turn in x.turns] == X_WINS[0:3:2] and [turn.text for turn in o.turns] == X_WINS[1:4:2]
    assert x.stop_reason == o.stop_reason == StopReason.MAX_TURNS and x.rewards == o.rewards == [0.0, 0.0]


class Broken(TicTacToeEnv):
    def result(self, role):
        if role == "o":
            raise RuntimeError("no result")
        return super().result(role)


class Tuples(TicTacToeEnv):
    def result(self, role):
        return 0.0, "nothing", True


class Contradicting(TicTacToeEnv):
    def result(self, role):
        result = super().result(role)
        result.done = not result.done
        return result


class Unknown(TicTacToeEnv):
    def act(self, role, response):
        super().act(role, response)
        self.mover = "z"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (Broken, "RuntimeError: no result"),
        (Contradicting, "returned done=True while the role that moves next is x"),
        (Tuples, "returned (0.0, 'nothing', True); it must return a StepResult"),
        (Unknown, "Unknown.mover is 'z'; it must be None or one of x, o"),
    ],
)
def test_an_error_fails_the_trajectories_of_all_roles(play, make, error):
    trajectories = play(X_WINS, make=make)
    assert [t.role for t in trajectories] == ["x", "o"]
    for trajectory in trajectories:
        assert trajectory.stop_reason == StopReason.ENV_ERROR and not trajectory.trainable
        assert error in trajectory.error.splitlines()[0]


@pytest.fixture
def collect(tiny_tokenizer, tiny_codec):
    """Function `collect(make)` that returns the report of one group of two episodes, which stays if they fail."""

    def collect(make):
        loop = SelfPlayLoop(
            ScriptedEngine(lambda name, turn: X_WINS[turn], tiny_tokenizer),
            make,
            partial(Conversation, tiny_codec),
            EnvironmentPool(2),
            EpisodeLimits(5, 400, 30, 60, 0),
            roles=TicTacToeEnv.roles,
        )
        sampling = SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)
        report = asyncio.run(Rollouts(loop, 0, 1.0).collect("g", [ROW], 2, sampling))
        loop.pool.close()
        return report

    return collect


def test_a_failed_episode_of_both_roles_counts_once(collect, caplog):
    report = collect(Broken)
    assert len(report.failures) == 4 and report.episodes == episode_count(report.failures) == 2
    assert "2 of 2 episodes failed" in caplog.text
    assert source_metrics(report, [source_of(ROW["id"])])[f"rollout/{source_of(ROW['id'])}/failed_episodes"] == 2.0


def test_a_group_holds_the_trajectories_of_both_roles(collect):
    (group,) = collect(TicTacToeEnv).groups
    assert [(t.role, t.index) for t in group.trajectories] == [("x", 0), ("o", 1), ("x", 2), ("o", 3)]
    assert [[t.index for t in part.trajectories] for part in group.by_role()] == [[0, 2], [1, 3]]
