"""Rows, worlds and players for the tests of search."""

import json

import pytest

from envs.search import FAMILY
from mtrl.config.schema import DataConfig
from mtrl.types import FinishReason, Trajectory, Turn

TRUTH = {
    "target": ["tin"],
    "passages": [
        ["mara", "mara works rome"],
        ["mara", "mara born oslo"],
        ["ben", "ben works oslo"],
        ["rome", "rome metal tin"],
        ["rome", "rome fruit fig"],
        ["oslo", "oslo metal zinc"],
        ["oslo", "oslo fruit pear"],
    ],
}
ARTICLES = [
    (
        "Warsaw",
        "Warsaw is the capital of Poland. It stands on the Vistula.",
        [("Where is it?", ["Vistula", "the Vistula"])],
    ),
    ("Super_Bowl_50", "The Denver Broncos won the game 24-10.", [("Who won?", ["Denver Broncos"]), ("By?", ["24-10"])]),
    ("Oxygen", "Oxygen has the symbol O and the atomic number 8.", [("What is its number?", ["8"]), ("Why?", [])]),
]


def row_of(truth=TRUTH, style="short", **more):
    return {"id": "row", "prompt": [{"role": "user", "content": "ask"}], "ground_truth": truth, "style": style, **more}


def play_responses(row, responses, **settings):
    """The step results of an episode, up to its end."""
    environment = FAMILY.environment(**{"max_turns": 5, **settings})
    environment.reset(row)
    results = []
    for response in responses:
        results.append(environment.step(response, row["ground_truth"]))
        if results[-1].done:
            break
    environment.close()
    return results


def trajectory_of(responses):
    """A trajectory that said this; the scorer reads nothing else of it."""
    turns = [Turn([], [], [], [], FinishReason.STOP, t, {"role": "assistant", "content": t}) for t in responses]
    return Trajectory("row", "group", 0, turns)


# Session fixtures that return functions, for hypothesis does not mix with fixtures of one test.


@pytest.fixture(scope="session")
def make_row():
    return row_of


@pytest.fixture(scope="session")
def play():
    return play_responses


@pytest.fixture(scope="session")
def score():
    """Success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(trajectory_of(responses), row)


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=1500), seed=0)


@pytest.fixture
def squad(tmp_path):
    """A file in SQuAD's form: 24 articles of one passage each."""
    path = tmp_path / "squad.json"
    articles = [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{context} This is copy {copy}.",
                    "qas": [
                        {
                            "id": f"{title}-{copy}-{n}",
                            "question": f"{question} ({copy})",
                            "answers": [{"text": text, "answer_start": 0} for text in answers],
                        }
                        for n, (question, answers) in enumerate(questions)
                    ],
                }
            ],
        }
        for copy in range(8)
        for title, context, questions in ARTICLES
    ]
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path
