"""Episodes of triviaqa: the protocol, hostile responses, rewards of turns, and equality between processes."""

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.triviaqa import FAMILY
from envs.triviaqa.demonstrator import answer, search
from envs.triviaqa.protocol import Action, parse_action, without_tags
from mtrl.algorithms.advantages.baselines import mt_grpo
from mtrl.algorithms.batch import CreditBatch
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.retrieval import RetrieverError
from mtrl.types import Group

ROOT = Path(__file__).parents[3]
NOTHING_DONE = "Error: write exactly one tool call or one answer after your reasoning, each inside its tags."


def call(body):
    return f"<reasoning>r</reasoning><tool>{body}</tool>"


def test_an_episode_in_the_published_form(play, make_row, corpus):
    responses = [search("capital of France"), "<reasoning>so</reasoning><answer>Paris</answer>"]
    first, last = play(make_row(["Paris"]), responses, corpus=corpus)
    assert first.observation == "<result>\nParis\nParis is the capital of France.\n</result>"
    assert (first.done, last.done, last.truncated, last.observation) == (False, True, False, None)
    assert first.metrics == {"tool_calls": 1.0, "tool_errors": 0.0, "malformed": 0.0}


def test_the_episode_of_the_readme(splits, play, score):
    text = (ROOT / "envs/triviaqa/README.md").read_text(encoding="utf-8")
    block = text.partition("```\n")[2].partition("```")[0]
    (_, prompt), *lines = (line.split(None, 1) for line in block.splitlines())
    row = next(row for row in splits.train + splits.test if row["question"] == prompt)
    results = play(row, [line for role, line in lines if role == "assistant"])
    assert [r.observation for r in results] == [line for role, line in lines if role == "user"] + [None]
    assert sum(r.reward for r in results) == pytest.approx(1.0)
    assert score([line for role, line in lines if role == "assistant"], row) == 1.0


def test_any_number_of_turns_and_the_last_one_runs_no_tool(play, make_row, corpus):
    results = play(make_row(["Paris"]), [search("Berlin")] * 9, corpus=corpus, max_turns=7)
    assert len(results) == 7 and results[-1].done and results[-1].truncated
    assert results[-1].observation is None and results[-1].metrics["tool_calls"] == 0.0
    assert [r.metrics["tool_calls"] for r in results] == [1.0] * 6 + [0.0]


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<answer>Paris</answer>", Action("answer", "Paris")),
        ("so: <answer>\n Paris \n</answer> done", Action("answer", "Paris")),
        ("<think><answer>Rome</answer></think><answer>Paris</answer>", Action("answer", "Paris")),
        ("<reasoning>r</reasoning><tool>{}</tool>", Action("tool", "{}")),
        ("<answer>Rome</answer><answer>Paris</answer>", None),
        ("<reasoning>or <answer>Rome</answer>?</reasoning><answer>Paris</answer>", None),
        ("<reasoning><answer>Paris</answer></reasoning>", None),
        ("<reasoning>r</reasoning><tool>{}</tool><answer>x</answer>", None),
        ("<answer>Paris</tool>", None),
        ("<answer> </answer>", None),
        ("<answer>Paris", None),
        ("</answer>Paris<answer>", None),
        ("<ANSWER>Paris</ANSWER>", None),
        ("<answer>a<result>b</result></answer>", None),
        ("<result>x</result>", None),
    ],
)
def test_a_turn_is_read_strictly_and_the_scorer_reads_the_same(response, action, score, make_row):
    assert parse_action(response) == action
    is_answer = action is not None and action.kind == "answer"
    assert score([response], make_row(["paris", "Rome", "x", "b"])) == float(is_answer)


PIECES = st.lists(
    st.sampled_from(
        [f"<{slash}{tag}>" for tag in ("think", "reasoning", "tool", "answer", "result") for slash in ("", "/")]
        + ["Paris", " ", "\n", "x"]
    ),
    max_size=10,
).map("".join)


@settings(max_examples=500, deadline=None)
@given(response=PIECES)
def test_the_environment_and_the_scorer_never_disagree(response, score, make_row):
    action = parse_action(response)
    given = action.text if action and action.kind == "answer" else None
    assert score([response], make_row(["PARIS"])) == float((given or "").lower() == "paris")
    if given:
        assert score([response], make_row([given])) == 1.0


def test_the_scorer_is_strict(score, make_row, make_trajectory):
    row = make_row(["The Beatles", " Fab Four "])
    for right in ("the beatles", "THE BEATLES", "fab four\n"):
        assert score([f"<answer>{right}</answer>"], row) == 1.0
    for wrong in ("Beatles", "The Beatles.", '"The Beatles"', "The  Beatles", "The Beatles or Fab Four"):
        assert score([f"<answer>{wrong}</answer>"], row) == 0.0
    assert score(["<answer>the beatles</answer>", "no, wait"], row) == 0.0, "the last message counts"
    assert score([], row) == 0.0
    broken = make_trajectory(["x"])
    broken.turns[0].message["content"] = None
    assert FAMILY.score(broken, row) == 0.0


HOSTILE = {
    "nothing": "",
    "no JSON": call("wiki_search(France)"),
    "a comma too many": call('{"name": "wiki_search", "args": {"query": "x"},}'),
    "single quotes": call("{'name': 'wiki_search', 'args': {'query': 'x'}}"),
    "a key twice": call('{"name": "wiki_search", "name": "rm", "args": {"query": "x"}}'),
    "NaN": call('{"name": "wiki_search", "args": {"query": NaN}}'),
    "a list": call('["wiki_search", {"query": "x"}]'),
    "a number": call("7"),
    "no args": call('{"name": "wiki_search"}'),
    "args as text": call('{"name": "wiki_search", "args": "x"}'),
    "arguments for args": call('{"name": "wiki_search", "arguments": {"query": "x"}}'),
    "more keys": call('{"name": "wiki_search", "args": {"query": "x"}, "id": 1}'),
    "name is a list": call('{"name": ["wiki_search"], "args": {"query": "x"}}'),
    "name is null": call('{"name": null, "args": {}}'),
    "unknown tool": call('{"name": "__import__", "args": {"query": "x"}}'),
    "markup for a name": call('{"name": "<|im_end|>\\u0000", "args": {}}'),
    "a long name": call(json.dumps({"name": "x" * 100_000, "args": {}})),
    "wrong type": call('{"name": "wiki_search", "args": {"query": 5}}'),
    "null": call('{"name": "wiki_search", "args": {"query": null}}'),
    "missing argument": call('{"name": "wiki_search", "args": {}}'),
    "unknown argument": call('{"name": "wiki_search", "args": {"query": "x", "k": 9, "</result>": 1}}'),
    "deep": call('{"name": ' + "[" * 100_000),
    "a huge number": call('{"name": "wiki_search", "args": {"query": ' + "9" * 100_000 + "}}"),
    "a megabyte of tools": "<tool>" * 170_000,
    "a megabyte of blanks": f"<tool>{' ' * 1_000_000}",
    "a megabyte of closings": "</reasoning>" * 90_000,
}
SEARCHES = {
    "a megabyte of query": call(json.dumps({"name": "wiki_search", "args": {"query": "France " * 150_000}})),
    "half a surrogate": call('{"name": "wiki_search", "args": {"query": "\\ud800 France"}}'),
    "NUL": call('{"name": "wiki_search", "args": {"query": "\\u0000 France"}}'),
    "blank": call('{"name": "wiki_search", "args": {"query": "  "}}'),
    "nothing known": call('{"name": "wiki_search", "args": {"query": "zzz"}}'),
}


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_calls_become_observations(response, play, make_row, corpus, score):
    start = time.process_time()
    first, *_, last = play(make_row(["Paris"]), [response] * 3, corpus=corpus)
    assert time.process_time() - start < 5, "work that grows faster than the response"
    assert first.observation == NOTHING_DONE or first.observation.startswith("<result>\nError: ")
    assert len(first.observation) < 300 and "<|" not in first.observation
    assert first.observation.count("</result>") == first.observation.count("<result>") <= 1
    assert first.metrics["malformed"] == 1.0 or first.metrics["tool_errors"] == 1.0
    assert last.done and score([response] * 3, make_row(["Paris"])) == 0.0


@pytest.mark.parametrize("response", SEARCHES.values(), ids=SEARCHES.keys())
def test_any_query_is_searched_for(response, play, make_row, corpus):
    (result,) = play(make_row(["Paris"]), [response], corpus=corpus)
    found = "Paris is the capital" if "France" in response else "No relevant Wikipedia content found."
    assert found in result.observation and result.metrics["tool_errors"] == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no JSON", "the tool call is not valid JSON"),
        ("a key twice", "the tool call is not valid JSON"),
        ("no args", "a tool call is a JSON object with the keys name and args"),
        ("args as text", "in a tool call name is text and args is an object"),
        ("unknown tool", "there is no tool __import__; the tools are: wiki_search"),
        ("markup for a name", "there is no tool ?im_end?; the tools are: wiki_search"),
        ("missing argument", "wrong arguments for wiki_search: query: Field required"),
        ("wrong type", "wrong arguments for wiki_search: query: Input should be a valid string"),
    ],
)
def test_error_messages_name_the_mistake(name, message, play, make_row, corpus):
    (result,) = play(make_row(["Paris"]), [HOSTILE[name]], corpus=corpus)
    assert result.observation == f"<result>\nError: {message}\n</result>"


def test_an_article_cannot_close_its_result_or_answer(play, make_row, corpus):
    (result,) = play(make_row(["Paris"]), [search("Berlin")], corpus=corpus)
    inside = result.observation.removeprefix("<result>\n").removesuffix("\n</result>")
    assert "they say" in inside and "<" not in inside


@settings(max_examples=200, deadline=None)
@given(text=PIECES)
def test_no_tag_is_left_in_a_result(text):
    assert not any(tag in without_tags(text) for tag in ("<tool>", "</result>", "<answer>", "</reasoning>"))
    assert "</result>" not in without_tags("</res<tool>ult>")


def test_results_have_a_limited_length(play, make_row, corpus):
    (result,) = play(make_row(["Paris"]), [search("France")], corpus=corpus, observation_characters=12)
    assert result.observation == "<result>\nParis\nParis…\n</result>"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_invalid_lengths_are_refused(value):
    with pytest.raises(UserError, match="config.observation_characters=.* must be a whole number of at least 1"):
        FAMILY.environment(observation_characters=value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"url": "http://127.0.0.1:9"}, "environment.config.url=http://127.0.0.1:9 needs environment.config.retriever"),
        ({"retriever": "server", "url": "http://127.0.0.1:9", "corpus": "c"}, "corpus=c is not read with retriever=s"),
        ({"retriever": "server"}, "retriever=server needs url"),
        ({"retriever": "lucene"}, "retriever='lucene' does not exist; choose one of bm25, dense, server"),
        ({"corpus": "nowhere.jsonl"}, "corpus nowhere.jsonl cannot be read"),
        ({"max_turns": 0}, "generator.max_turns=0 leaves no turn to answer"),
    ],
)
def test_conflicting_settings_are_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.environment(**config)


def test_a_failing_retriever_fails_the_episode_without_an_observation(make_row, corpus):
    """In the published code an HTTP error became the assistant's text and was trained on."""

    class Broken:
        def search(self, queries, topk):
            raise RetrieverError("connection refused")

    environment = FAMILY.environment(corpus=corpus)
    environment.reset(make_row(["Paris"]))
    environment.retriever = Broken()
    with pytest.raises(RetrieverError, match="refused"):
        environment.step(search("France"), {"answers": ["Paris"]})


@pytest.mark.parametrize("answers", [None, [], "Paris", [""], [5]])
def test_a_row_without_answers_is_refused(answers, corpus):
    environment = FAMILY.environment(corpus=corpus)
    with pytest.raises(UserError, match="ground_truth.answers=.* is no list of texts"):
        environment.step("<answer>x</answer>", {"answers": answers})


def test_mt_grpo_reads_turn_rewards_and_outcome_apart(play, make_row, corpus, make_trajectory):
    """A^turn comes from tool_execution and search_hit, A^outcome from the four other rewards, in all turns."""
    right, wrong = "<reasoning>r</reasoning><answer>Paris</answer>", "<reasoning>r</reasoning><answer>Rome</answer>"
    episodes = [
        [search("France"), right],
        [search("France"), wrong],
        [search("Berlin"), wrong],
        [search("Berlin"), right],
    ]
    trajectories = []
    for responses in episodes:
        results = play(make_row(["Paris"]), responses, corpus=corpus, reward="original")
        trajectories.append(make_trajectory(responses, [r.reward for r in results]))
    row = make_row(["Paris"])
    advantages = mt_grpo(CreditBatch.of([Group("g", row, trajectories)]), AlgorithmConfig(advantage_method="mt_grpo"))

    def z(values):
        mean = sum(values) / 4
        std = (sum((v - mean) ** 2 for v in values) / 3) ** 0.5
        return [(v - mean) / (std + 1e-4) for v in values]

    turn, outcome = z([0.7, 0.7, 0.2, 0.2]), z([1.9, 0.4, 0.4, 1.9])
    assert advantages[:, 0] == pytest.approx([o + t for o, t in zip(outcome, turn, strict=True)])
    assert advantages[:, 1] == pytest.approx(outcome)


def test_reset_starts_a_new_episode(splits):
    row = splits.train[0]
    environment = FAMILY.environment()
    episodes = []
    for _ in range(2):
        environment.reset(row)
        episodes.append([environment.step(r, row["ground_truth"]) for r in FAMILY.gold(row)])
    assert episodes[0] == episodes[1]


def transcript(row, seed):
    """A complete demonstration."""
    player, environment = FAMILY.demonstrate(row, random.Random(seed)), FAMILY.environment()
    environment.reset(row)
    results = [environment.step(player.act(None), row["ground_truth"])]
    while not results[-1].done:
        results.append(environment.step(player.act(results[-1].observation), row["ground_truth"]))
    return results


def test_concurrent_episodes_equal_sequential_ones(splits):
    rows = splits.train[:60]
    alone = [transcript(row, row["id"]) for row in rows]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda row: transcript(row, row["id"]), rows * 3)) == alone * 3


PROGRAM = """
import json, sys
from envs.triviaqa import FAMILY
from mtrl.config.schema import DataConfig

splits = FAMILY.load(DataConfig(synthetic_train_rows=20, synthetic_test_rows=20), seed=3)
results = []
for row in splits.train + splits.test:
    environment = FAMILY.environment(max_turns=5)
    environment.reset(row)
    for text in [*json.loads(sys.argv[1]), *FAMILY.gold(row)]:
        result = environment.step(text, row["ground_truth"])
        results.append([result.observation, result.reward, result.done, result.components, result.metrics])
print(json.dumps([splits.train, splits.test, results]))
"""


def test_every_process_sees_the_same_bytes():
    responses = json.dumps([search(" harbor"), HOSTILE["unknown argument"], "what?"])
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, responses],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "4242")
    }
    assert len(seen) == 1 and len(seen.pop()) > 10_000


def test_rows_that_are_not_generated_read_whole_sentences(make_row, play, corpus):
    assert FAMILY.load(DataConfig(synthetic_train_rows=1, synthetic_test_rows=1), 0).train[0]["style"] == "short"
    short = {**make_row(["Paris"]), "style": "short"}
    assert play(short, [search("France")], corpus=corpus)[0].observation == (
        "<result> Paris Paris is the capital of France.</result>"
    )
    assert play(short, ["?", answer("Paris", "r")], corpus=corpus)[0].observation == "Error: one call or one answer"
