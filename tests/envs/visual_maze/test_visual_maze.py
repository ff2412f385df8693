"""The visual maze: rules, pictures, and a scorer that agrees with the reward."""

import random

import numpy as np
import pytest

from envs.visual_maze.environment import VisualMazeEnv, parse_move
from envs.visual_maze.maze import FREE, GOAL, STEPS, WALKER, WALL, Maze
from mtrl.config.schema import DataConfig
from mtrl.environments.family import get_family
from mtrl.errors import UserError
from mtrl.types import FinishReason, StopReason, Trajectory, Turn, images_in
from mtrl.utils.images import pixels_of

FAMILY = get_family("visual_maze")
GRID = ["S.#", "#.G"]


@pytest.fixture(scope="module")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=60, synthetic_test_rows=20), 0)


def played(row, act):
    """Return the trajectory of an episode; `act(observation)` returns a response."""
    environment, turns, is_over = VisualMazeEnv(), [], False
    environment.reset(row)
    seen = row["prompt"]
    while not is_over:
        text = act(None)
        result = environment.step(text, row["ground_truth"])
        message = {"role": "assistant", "content": text}
        turns.append(
            Turn([], [1], [0.0], [(0, 1)], FinishReason.STOP, text, message, observation=seen, reward=result.reward)
        )
        seen, is_over = result.observation or [], result.done
    return Trajectory("t", "g", 0, turns, StopReason.DONE, seen)


def test_reward_and_scorer_agree_in_weak_episodes(splits):
    rewards = set()
    for row in splits.train:
        for seed in range(4):
            trajectory = played(row, FAMILY.demonstrate(row, random.Random(seed)).act)
            assert FAMILY.score(trajectory, row) == trajectory.reward
            rewards.add(trajectory.reward)
    assert rewards == {0.0, 1.0}


def test_gold_solves_every_row_and_the_splits_are_apart(splits):
    for row in splits.train + splits.test:
        responses = iter(FAMILY.gold(row))
        assert played(row, lambda observation, responses=responses: next(responses)).reward == 1.0
        assert next(responses, None) is None
        assert FAMILY.gold(row)[-1] not in FAMILY.decoys(row)
    keys = [row["key"] for row in splits.train + splits.test]
    assert len(set(keys)) == len(keys) == 80
    with pytest.raises(ValueError, match="is held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_the_picture_is_the_maze():
    maze = Maze(GRID)
    expected = np.array([[WALKER, FREE, WALL], [WALL, FREE, GOAL]], np.uint8)
    for cell in (1, 4):
        assert (maze.picture(cell)[::cell, ::cell] == expected).all()
        assert maze.picture(cell).shape == (2 * cell, 3 * cell, 3)
    maze.go("right")
    expected[0, :2] = FREE, WALKER
    assert (maze.picture(1) == expected).all()


def test_every_observation_shows_the_picture_after_the_step():
    row = {"id": "0", "prompt": [], "ground_truth": {"grid": GRID}}
    environment, maze = VisualMazeEnv(max_turns=4), Maze(GRID)
    environment.reset(row)
    for move, said in (("left", ""), ("nowhere", "write one <move>"), ("right", "")):
        result = environment.step(f"<move>{move}</move>", row["ground_truth"])
        if move in STEPS:
            maze.go(move)
        ((image,), texts) = images_in(result.observation), [p["text"] for p in result.observation[0]["content"][:-1]]
        assert (pixels_of(image) == maze.picture(4)).all() and texts == ([said] if said else [])
        assert result.metrics == {"malformed": float(move == "nowhere")} and not result.done
    assert environment.step("<move>down</move>", row["ground_truth"]).truncated


@pytest.mark.parametrize(
    ("response", "move"),
    [
        ("<move>up</move>", "up"),
        ("I see <move> Left\n</move>", "left"),
        ("<move>up</move></think><move>down</move>", "down"),
        ("<move>up</move><move>up</move>", None),
        ("</move>up<move>", None),
        ("<move>north</move>", None),
        ("up", None),
    ],
)
def test_a_move_and_its_form(response, move):
    assert parse_move(response) == move
    turn = Turn([], [1], [0.0], [(0, 1)], FinishReason.STOP, response, {"role": "assistant", "content": response})
    trajectory = Trajectory("t", "g", 0, [turn], StopReason.DONE)
    row = {"ground_truth": {"grid": GRID}}
    assert FAMILY.answered(trajectory, row) == (move is not None)
    assert FAMILY.measure(trajectory, row) == {"format": float(move is not None)}


@pytest.mark.parametrize("truth", [{}, {"grid": ["S#G"]}, {"grid": ["S.", "G"]}, {"grid": ["SSG"]}, {"grid": "SG"}])
def test_other_rows_are_refused(truth):
    with pytest.raises(UserError, match="is no maze row; write lines of one length"):
        Maze.from_truth(truth)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"size": 2}, "environment.config.size=2 must be a whole number from 3 to 9"),
        ({"steps": 1}, "environment.config.steps=1 must be a whole number from 2 to 40"),
        ({"cell": True}, "environment.config.cell=True must be a whole number from 1 to 256"),
    ],
)
def test_settings_of_the_loader(config, said):
    with pytest.raises(UserError, match=said):
        FAMILY.load(DataConfig(), 0, **config)


def test_other_settings():
    with pytest.raises(UserError, match="data.path=mazes.jsonl is not read by visual_maze, .*; set data.path=null"):
        FAMILY.load(DataConfig(path="mazes.jsonl"), 0)
    with pytest.raises(UserError, match="generator.max_turns=3 cannot solve"):
        VisualMazeEnv(max_turns=3)
