"""Episodes of the games: ends of episodes, hostile responses, and equality between processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.games import FAMILY
from envs.games.environment import make_game
from mtrl.errors import UserError

ROOT = Path(__file__).parents[3]
COMPLAINT = "write one <move> ; 5 left"
HOSTILE = {
    "nothing": "",
    "talk": "I go north.",
    "a megabyte": "x" * 1_000_000,
    "a megabyte of openings": "<move>" * 170_000,
    "a megabyte inside": f"<move>{' ' * 1_000_000}north</move>",
    "a megabyte of digits": f"<move>{'7' * 1_000_000}</move>",
    "a megabyte of closings": "</think>" * 125_000,
    "nested": "<move><move>north</move></move>",
    "two moves": "<move>north</move><move>east</move>",
    "backwards": "</move>north<move>",
    "open": "<move>north",
    "closed": "north</move>",
    "upper tag": "<MOVE>north</MOVE>",
    "empty": "<move></move>",
    "NUL": "<move>nor\0th</move>",
    "NUL digits": "<move>7\0002\0005</move>",
    "fullwidth digits": "<move>７２５</move>",
    "arabic digits": "<move>٧٢٥</move>",
    "superscripts": "<move>⁷²⁵</move>",
    "long s": "<move>ſouth</move>",
    "half a surrogate": "<move>\ud800</move>",
    "a thought only": "<think><move>east</move></think>",
}


@pytest.mark.parametrize("game", ["mastermind", "maze"])
@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_responses_use_up_a_turn_and_get_the_same_observation(game, response, truths, make_row, play, score):
    row = make_row(truths[game])
    start = time.process_time()
    results = play(row, [response] * 6, max_turns=6)
    assert score([response] * 6, row) == 0.0
    assert time.process_time() - start < 5, "work that grows faster than the response"
    assert results[0].observation == COMPLAINT and len(results) == 6
    assert all(result.reward == 0.0 and result.metrics["malformed"] == 1.0 for result in results)
    assert results[-1].done and results[-1].truncated and results[-1].observation is None


@pytest.mark.parametrize("game", ["mastermind", "maze"])
def test_a_malformed_turn_changes_nothing_but_the_count(game, truths, make_row, play):
    row = make_row(truths[game])
    move = FAMILY.gold(row)[0]
    (straight,), (_, later) = play(row, [move]), play(row, ["what?", move])
    assert later.observation == straight.observation.replace("5 left", "4 left")


README_GAMES = [
    {"game": "mastermind", "code": "081", "symbols": "8901"},
    {"game": "maze", "grid": ["#...", "##.#", "...G", ".S.#"]},
]


def test_the_episodes_of_the_readme(make_row, play):
    for truth, (prompt, *texts) in zip(README_GAMES, _episodes(), strict=True):
        assert make_game(truth).opening == prompt
        results = play(make_row(truth), texts[::2])
        assert [result.observation for result in results] == [*texts[1::2], None]
        assert results[-1].reward == 1.0


def _episodes():
    """The conversations in the README, as lists of texts in order."""
    text = (ROOT / "envs/games/README.md").read_text(encoding="utf-8")
    lines = [line.split(None, 1) for line in text.splitlines() if line.startswith(("user ", "assistant "))]
    starts = [n for n, (_, texts) in enumerate(lines) if texts.startswith(("maze ;", "code of"))]
    return [[texts for _, texts in lines[a:b]] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


@pytest.mark.parametrize("game", ["mastermind", "maze"])
def test_thinking_is_not_read(game, truths, make_row, play, score):
    row = make_row(truths[game])
    thought = [f"<think>or <move>east</move>? no</think>so {move}." for move in FAMILY.gold(row)]
    assert [r.reward for r in play(row, thought)][-1] == score(thought, row) == 1.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_turns": 0}, "generator.max_turns=0 leaves no turn to move"),
        ({"max_turns": 3, "steps": 4}, "environment.config.steps=4 asks for mazes that generator.max_turns=3"),
    ],
)
def test_settings_that_cannot_be_solved_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.environment(**settings)


def test_the_length_of_mazes_does_not_limit_mastermind():
    assert FAMILY.environment(max_turns=1, game="mastermind", steps=4).max_turns == 1


def test_reset_starts_a_new_episode(truths, make_row):
    row = make_row(truths["maze"])
    environment = FAMILY.environment(reward="progress")
    episodes = []
    for _ in range(2):
        environment.reset(row)
        episodes.append([environment.step(move, row["ground_truth"]) for move in FAMILY.gold(row)])
    assert episodes[0] == episodes[1]


RESPONSES = st.lists(
    st.sampled_from(["north", "east", "south", "west", "725", "789", "2 8 5", "up", "", "NORTH "]),
    min_size=6,
    max_size=6,
)
PROGRAM = """
import json, sys
from envs.games import FAMILY
from mtrl.config.schema import DataConfig

splits = FAMILY.load(DataConfig(synthetic_train_rows=20, synthetic_test_rows=20), seed=3)
texts = []
for row in splits.train + splits.test:
    environment = FAMILY.environment()
    environment.reset(row)
    for word in json.loads(sys.argv[1]):
        result = environment.step(f"<move>{word}</move>", row["ground_truth"])
        texts.append([result.observation, result.reward, result.done, result.components, result.metrics])
        if result.done:
            break
print(json.dumps([splits.train, splits.test, texts]))
"""


def test_every_process_sees_the_same_bytes():
    words = json.dumps(["north", "east", "257", "789", "south", "west"])
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, words],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1 and len(seen.pop()) > 10_000


@settings(max_examples=200, deadline=None)
@given(words=RESPONSES)
def test_the_same_actions_give_the_same_results(words, truths, make_row, play):
    for truth in truths.values():
        responses = [f"<move>{word}</move>" for word in words]
        assert play(make_row(truth), responses) == play(make_row(truth), responses)
