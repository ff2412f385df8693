"""Rows, worlds and episodes for the tests of search."""

import json

import pytest

from envs.search import FAMILY
from mtrl.config.schema import DataConfig
from tests.envs.episodes import play_responses, trajectory_of

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


def play_family(row, responses, **settings):
    return play_responses(FAMILY, row, responses, **{"max_turns": 5, **settings})


# Session fixtures that return functions, because hypothesis does not support fixtures of one test.


@pytest.fixture(scope="session")
def make_row():
    return row_of


@pytest.fixture(scope="session")
def play():
    return play_family


@pytest.fixture(scope="session")
def score():
    """Return the success of these responses, by the scorer."""
    return lambda responses, row: FAMILY.score(trajectory_of(responses), row)


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=1500), seed=0)


@pytest.fixture
def squad(tmp_path):
    """A file in the format of SQuAD with 24 articles of one passage each."""
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
