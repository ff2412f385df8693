"""The scorer of sop: it requires every field of the last answer, and shares no code with the reward."""

import ast
import json
from pathlib import Path

import pytest

from envs.sop import FAMILY, scorer
from envs.sop.data import final_output
from mtrl.types import FinishReason, Trajectory, Turn


@pytest.fixture(scope="module")
def row(by_domain):
    return by_domain["customer_service"][0]


def test_success_requires_every_field(row, score):
    truth = row["ground_truth"]
    assert score([final_output(truth)], row) == 1.0
    for name in truth:
        assert score([final_output({**truth, name: "x"})], row) == 0.0
        assert score([final_output({k: v for k, v in truth.items() if k != name})], row) == 0.0
    assert score([final_output({**truth, "more": "x"})], row) == 0.0
    assert score([final_output(dict(reversed(truth.items())))], row) == 1.0


def test_only_a_last_message_without_calls_counts(row, score):
    right = final_output(row["ground_truth"])
    assert score([right, "hm"], row) == 0.0 and score(["hm", right], row) == 1.0
    assert score([], row) == 0.0
    message = {"role": "assistant", "content": right, "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}
    trajectory = Trajectory("row", "group", 0, [Turn([], [], [], [], FinishReason.STOP, right, message)])
    assert FAMILY.score(trajectory, row) == 0.0
    trajectory.turns[0].message = {"role": "assistant", "content": None}
    assert FAMILY.score(trajectory, row) == 0.0


def test_the_score_does_not_depend_on_the_reward(row):
    turn = Turn([], [], [], [], FinishReason.STOP, "hm", {"role": "assistant", "content": "hm"}, reward=1.0)
    assert FAMILY.score(Trajectory("row", "group", 0, [turn]), row) == 0.0


def test_observations_are_not_answers(row):
    right = final_output(row["ground_truth"])
    observation = [{"role": "tool", "content": right}]
    trajectory = Trajectory("row", "group", 0, final_observation=observation)
    assert FAMILY.score(trajectory, row) == 0.0


def test_a_row_without_labels_is_never_solved(score):
    assert score(["<final_output>{}</final_output>"], {"ground_truth": {}}) == 0.0


def test_it_shares_no_code_with_the_reward():
    tree = ast.parse(Path(scorer.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "typing", "mtrl.types"}


def test_the_best_constant_answer_solves_few_cases(splits, score):
    """Calling the tools must be necessary. The answer is the most frequent one of the domain's training cases."""
    domains = {row["domain"] for row in splits.train}
    for domain in domains:
        answers = [json.dumps(r["ground_truth"]) for r in splits.train if r["domain"] == domain]
        best = json.loads(max(set(answers), key=answers.count))
        held_out = [row for row in splits.test if row["domain"] == domain]
        solved = sum(score([final_output(best)], row) for row in held_out) / len(held_out)
        assert solved < 0.2 and answers.count(json.dumps(best)) / len(answers) < 0.2, domain
