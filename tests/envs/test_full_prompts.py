"""The prompts for language models: their text, their worked examples, and the unchanged prompts of the tiny policy."""

import asyncio
import inspect
import json
import re
from hashlib import sha256

import pytest

from envs.tic_tac_toe.prompts import EXAMPLE_ROW
from mtrl.config.schema import DataConfig
from mtrl.environments.family import BUILT_IN, get_family
from mtrl.environments.worked_example import read_example
from mtrl.rollout.stepper import text_message
from mtrl.utils.images import pixels_of
from tests.envs.episodes import trajectory_of
from tests.envs.full_prompts import FOLDER, TASKS, rows, text_of

SHORT_ROWS = {
    "gsm8k": "be9345abf3bc6c6e",
    "text_to_sql": "f993849e235d0eaa",
    "games": "3b2e61e8e05f44d3",
    "search": "537fd968c7a33505",
    "triviaqa": "f8d9e655815d70d6",
    "mini_swe": "81c39eda972fa93f",
    "sop": "145caa14727f280d",
    "service": "1007511ed311cea5",
    "tic_tac_toe": "fe28aa21fc95e84c",
    "visual_maze": "e00f6f9ef67439f1",
}
"""SHA-256 of the generated rows of each family, of most from before full prompts had worked examples."""


def results_of(family, config, row, responses):
    """The step results of a worked example."""

    async def play():
        environment = family.environment(max_turns=len(responses) + 3, **config)
        results = []
        try:
            environment.reset(row)
            for number, response in enumerate(responses):
                if hasattr(environment, "respond"):
                    message = text_message(response, environment.tools, number)
                    result = environment.respond(message, response, row["ground_truth"])
                else:
                    result = environment.step(response, row["ground_truth"])
                results.append(await result if inspect.isawaitable(result) else result)
        finally:
            environment.close()
        return results

    return asyncio.run(play())


def reply_of(result):
    """The text of an observation, without the number of turns that are left."""
    observation = result.observation or ""
    texts = [observation] if isinstance(observation, str) else [message["content"] for message in observation]
    return without_count("".join(texts))


def without_count(text):
    return re.sub(r"\d+(?= (?:turns?|responses?)? ?left)", "N", text).replace("turns", "turn")


@pytest.mark.parametrize("name", TASKS)
def test_the_full_prompt_of_each_task(name):
    golden = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert text_of(rows(name)[0]["prompt"]) == golden, "python -m tests.envs.full_prompts writes the new text"


@pytest.mark.parametrize("name", TASKS)
def test_worked_examples_show_the_replies_of_the_environment_and_earn_the_full_reward(name, tmp_path):
    (family, config), row = TASKS[name], rows(name)[0]
    family, example = get_family(family), read_example(row["prompt"])
    if name == "triviaqa":  # its example is about Wikipedia, which the synthetic encyclopaedia is not
        passage = {"id": "1", "contents": "Rome\nRome is the capital of Italy. The river Tiber flows through it."}
        (tmp_path / "corpus.jsonl").write_text(json.dumps(passage))
        config = {"corpus": str(tmp_path / "corpus.jsonl")}
    if name == "maze":
        config = {**config, "steps": 3}
    task = family.worked_example(row)
    results = results_of(family, config, task, example.responses)
    assert [reply_of(result) for result in results[:-1]] == [without_count(reply) for reply in example.replies[1:]]
    assert results[-1].done and sum(result.reward for result in results) == pytest.approx(1.0)
    trajectory = trajectory_of(example.responses)
    assert family.score(trajectory, task) == 1.0 and family.answered(trajectory, task)


@pytest.mark.parametrize("name", TASKS)
def test_worked_examples_are_no_rows_of_the_task(name):
    family, config = TASKS[name]
    data = DataConfig(synthetic_train_rows=500, synthetic_test_rows=100)
    splits = get_family(family).load(data, 0, prompt="full", **config)
    example = read_example(splits.train[0]["prompt"])
    if name == "tic_tac_toe":  # its rows have few openings and differ in the fixed opponent
        assert EXAMPLE_ROW["ground_truth"] not in [row["ground_truth"] for row in splits.train + splits.test]
        return
    assert example.replies[0] not in {row["prompt"][1]["content"] for row in splits.train + splits.test}


@pytest.mark.parametrize("name", BUILT_IN)
def test_short_prompts_are_unchanged(name):
    splits = get_family(name).load(DataConfig(synthetic_train_rows=40, synthetic_test_rows=20), 0)
    text = json.dumps([splits.train, splits.test], sort_keys=True, default=str)
    # Other versions of zlib write other bytes for the same pixels.
    text = re.sub(r"data:image/png[^\"]+", lambda image: pixels_of(image[0]).tobytes().hex(), text)
    assert sha256(text.encode()).hexdigest()[:16] == SHORT_ROWS[name]


def test_published_gsm8k_rows_get_either_prompt(tmp_path):
    answer = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "How many clips?", "answer": answer}))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "How many pens?", "answer": answer}))
    load, data = get_family("gsm8k").load, DataConfig(path=str(tmp_path))
    (short,), (full,) = load(data, 0).train, load(data, 0, prompt="full").train
    assert [message["role"] for message in short["prompt"]] == ["user"]
    assert short["prompt"][0]["content"].startswith("How many clips? Let's think step by step")
    assert full["prompt"][1] == {"role": "user", "content": "How many clips?"}
    assert full["prompt"][0] == rows("gsm8k")[0]["prompt"][0], "generated rows get the same instructions"
