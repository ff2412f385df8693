"""Retrievers of episodes: one per process, a real server, and an unreachable server."""

import asyncio
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from omegaconf import ListConfig

from envs.search import FAMILY
from envs.search.retrievers import RetrieverSettings
from mtrl.config.schema import DataConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.errors import UserError
from mtrl.retrieval import RetrieverError
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.types import StopReason

ROOT = Path(__file__).parents[3]
QUICK = {"timeout": 2.0, "retries": 0}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": n, "title": f"Number {n}", "text": f"The number {n} has the name n{n}."} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def dead():
    """The address of a port without a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"number {n}?", "answer": f"n{n}"}) + "\n" for n in range(9)))
    return str(path)


def test_the_retriever_is_made_once(corpus, monkeypatch):
    made = []

    def make(*args, **options):
        made.append(args)
        return object()

    monkeypatch.setattr("envs.search.retrievers.make_retriever", make)
    settings = RetrieverSettings(corpus=corpus)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: RetrieverSettings(corpus=corpus).make(), range(64)))
    assert len(made) == 1 and all(each is found[0] for each in found)
    assert RetrieverSettings(corpus=corpus, options=(("stopwords", "english"),)).make() is not settings.make()


def test_a_list_of_stopwords_is_a_setting_of_the_retriever(corpus):
    given = (["name"], ListConfig(["name"]), ["has"])
    found = [RetrieverSettings.of("bm25", None, corpus, {"stopwords": words}).make() for words in given]
    assert found[0] is found[1] is not found[2]
    assert found[0].search(["name"], 1) == [[]] and len(found[2].search(["name"], 1)[0]) == 1


@pytest.fixture
def server(corpus):
    pytest.importorskip("fastapi")
    command = [sys.executable, str(ROOT / "scripts/retriever_server.py"), "--corpus", corpus, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("ready "), line
        yield line.split()[1]
    finally:
        process.kill()
        process.wait()


def test_a_server_is_searched_as_a_corpus_is(server, corpus, rows, play):
    config = {"retriever": "server", "url": server, **QUICK}
    splits = FAMILY.load(DataConfig(path=rows), 0, **config)
    for row in splits.train:
        responses = ["<search>zq</search>", *FAMILY.gold(row)]
        results = play(row, responses, **config)
        assert results == play(row, responses, corpus=corpus) and results[-1].reward == 1.0
        assert "Doc 1(Title: Number " in results[1].observation


def test_an_unreachable_server_is_refused_before_the_run(dead, rows):
    with pytest.raises(UserError, match=rf"environment.config.url={dead}: .* could not be reached .* start it"):
        FAMILY.load(DataConfig(path=rows), 0, retriever="server", url=dead, **QUICK)


def test_a_server_that_stops_fails_the_episode(dead, tiny_tokenizer, tiny_codec):
    """The failed episode gets no reward and is not trained on, because its group is replaced."""
    responses = ["<answer>no</answer>", "<search>number 3</search>"]
    row = {"id": "r", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"target": ["n3"]}}
    pool = EnvironmentPool(2)
    loop = EpisodeLoop(
        ScriptedEngine(lambda trajectory_id, turn: responses[int(trajectory_id[-1])], tiny_tokenizer),
        partial(FAMILY.environment, max_turns=4, retriever="server", url=dead, **QUICK),
        partial(Conversation, tiny_codec),
        pool,
        EpisodeLimits(4, max_context_length=6000, step_timeout=20, episode_timeout=30, retries=1),
    )
    sampling = SamplingParams(max_generate_length=400, stop_token_ids=tiny_codec.stop_token_ids)
    answered, searched = (asyncio.run(loop.run(row, "g", index, sampling)) for index in (0, 1))
    pool.close()
    assert answered.stop_reason == StopReason.DONE and answered.trainable
    assert searched.stop_reason == StopReason.ENV_ERROR and not searched.trainable
    assert searched.error.startswith(f"RetrieverError: the retriever at {dead}/retrieve could not be reached")
    assert searched.metrics["attempts"] == 2 and searched.reward == 0.0


def test_requests_to_a_dead_server_end_before_the_step_timeout(dead, make_row, monkeypatch):
    """With the default limits the retriever's own error ends the episode, before the time-out."""
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    environment = FAMILY.environment(retriever="server", url=dead)
    row = make_row({"target": ["n3"]})
    environment.reset(row)
    with pytest.raises(RetrieverError, match="in 3 attempts"):
        environment.step("<search>x</search>", row["ground_truth"])
    assert sum(waited) + 3 * 8.0 < 30.0
