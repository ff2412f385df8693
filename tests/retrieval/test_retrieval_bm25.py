"""BM25: scores equal those of an independent implementation, and do not depend on order or threads."""

import math
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.retrieval import Passage, make_retriever

ROOT = Path(__file__).parent.parent.parent
WORDS = st.lists(st.sampled_from(["river", "bridge", "The", "the", "Über", "1809", "x", "of"]), max_size=8).map(
    " ".join
)
CORPORA = st.lists(WORDS, min_size=1, max_size=8).map(
    lambda texts: [Passage(str(index), "", text) for index, text in enumerate(texts)]
)


def plain_scores(passages, query, k1=1.2, b=0.75, stopwords=()):
    """Return the BM25 score of each passage by the plain formula, in float64."""

    def words(text):
        return [word for word in re.findall(r"\w+", text.lower()) if word not in stopwords]

    documents = [words(passage.title + "\n" + passage.text) for passage in passages]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in words(query):
            holding = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            if counts[word]:
                score += idf * counts[word] / (counts[word] + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


@settings(deadline=None, max_examples=150)
@given(CORPORA, WORDS, st.sampled_from([0.5, 1.2, 2.0]), st.sampled_from([0, 0.75, 1]), st.booleans())
def test_scores_are_those_of_an_independent_implementation(passages, query, k1, b, without_stopwords):
    stopwords = ("the", "of") if without_stopwords else ()
    retriever = make_retriever("bm25", passages, k1=k1, b=b, stopwords=stopwords)
    scores = plain_scores(passages, query, k1, b, stopwords)
    (hits,) = retriever.search([query], topk=100)
    found = {int(hit.passage.id): hit.score for hit in hits}
    assert found == pytest.approx({index: score for index, score in enumerate(scores) if score > 0}, rel=1e-5)
    assert [hit.score for hit in hits] == sorted(found.values(), reverse=True)


@settings(deadline=None, max_examples=100)
@given(CORPORA, WORDS, st.integers(1, 9))
def test_topk_hits_are_the_first_of_all_hits_and_ties_are_in_corpus_order(passages, query, topk):
    retriever = make_retriever("bm25", passages)
    (everything,) = retriever.search([query], 100)
    assert retriever.search([query], topk) == [everything[:topk]]
    keys = [(-hit.score, int(hit.passage.id)) for hit in everything]
    assert keys == sorted(keys)


@settings(deadline=None, max_examples=100)
@given(CORPORA, WORDS, st.randoms(use_true_random=False))
def test_the_order_of_the_corpus_affects_only_ties(passages, query, rng):
    shuffled = rng.sample(passages, len(passages))
    (before,), (after,) = (make_retriever("bm25", corpus).search([query], 100) for corpus in (passages, shuffled))
    assert {hit.passage.id: hit.score for hit in before} == {hit.passage.id: hit.score for hit in after}


def test_questions_find_their_passages(passages, questions):
    found = make_retriever("bm25", passages).search(questions, 1)
    assert [hits[0].passage for hits in found] == passages


def test_hits_do_not_depend_on_batches_or_threads(passages, questions):
    retriever = make_retriever("bm25", passages)
    together = retriever.search(questions, 5)
    assert [retriever.search([question], 5)[0] for question in questions] == together
    wrong, start = [], threading.Barrier(8)

    def ask(seed):
        start.wait()
        order = random.Random(seed).sample(range(len(questions)), len(questions))
        wrong.extend(index for index in order if retriever.search([questions[index]], 5)[0] != together[index])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


HOSTILE = ["", " \n\t", "?!", "quux zyzzy", "\0", "\ud800", "\x00\ud800 \U0010ffff", "🙂"]


def test_queries_without_known_words_have_no_hits(passages):
    retriever = make_retriever("bm25", passages)
    assert retriever.search(HOSTILE, 3) == [[]] * len(HOSTILE)
    assert retriever.search([], 3) == []
    (mixed,) = retriever.search(["quux \ud800 BRIDGE \0"], 3)
    assert mixed == retriever.search(["bridge"], 3)[0] and len(mixed) == 3


def test_long_queries_are_cut(passages):
    retriever = make_retriever("bm25", passages)
    start = "bridge " * 585  # 4,095 characters
    assert retriever.search([start + "  " + "smiths " * 10**5], 3) == retriever.search([start], 3)


def test_corpora_of_one_passage_and_without_words():
    (hits,) = make_retriever("bm25", [Passage("a", "A", "one word")]).search(["word"], 10)
    assert [hit.passage.id for hit in hits] == ["a"] and hits[0].score > 0
    assert make_retriever("bm25", [Passage("a", "", "..."), Passage("b", "", "")]).search(["a"], 3) == [[]]


def test_english_stopwords():
    passages = [Passage("a", "", "the cat"), Passage("b", "", "a dog and the bird")]
    assert make_retriever("bm25", passages, stopwords="english").search(["the and", "The cat"], 3) == [
        [],
        make_retriever("bm25", passages, stopwords=["the", "a", "and"]).search(["cat"], 3)[0],
    ]
    assert len(make_retriever("bm25", passages).search(["the"], 3)[0]) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k1": 0}, "k1=0 must be more than 0"),
        ({"b": 1.5}, "b=1.5"),
        ({"stopwords": "german"}, "stopwords='german' must be 'english'"),
        ({"stopwords": 5}, "stopwords=5 must be 'english' or a list of words"),
        ({"stopwords": ["the", 1]}, r"stopwords=\['the', 1\] must be 'english' or a list of words"),
        ({"k2": 1}, "retriever=bm25 has no option 'k2'; it has k1, b, stopwords"),
        ({"url": "http://127.0.0.1:1"}, "retriever=bm25 makes no use of url"),
    ],
)
def test_wrong_options_are_user_errors(passages, options, message):
    with pytest.raises(UserError, match=message):
        make_retriever("bm25", passages, **options)


def test_wrong_kinds_and_calls_are_errors(passages):
    with pytest.raises(UserError, match="retriever='lucene' does not exist; choose one of bm25, dense, server"):
        make_retriever("lucene", passages)
    with pytest.raises(UserError, match="retriever=bm25 needs passages"):
        make_retriever("bm25")
    with pytest.raises(UserError, match="no passages"):
        make_retriever("bm25", [])
    with pytest.raises(UserError, match="retriever=server makes no use of passages"):
        make_retriever("server", passages, url="http://127.0.0.1:1")
    retriever = make_retriever("bm25", passages)
    with pytest.raises(ValueError, match="topk=0"):
        retriever.search(["a"], 0)
    with pytest.raises(ValueError, match="one text"):
        retriever.search("a", 1)


def test_hits_are_equal_in_every_process_and_nothing_is_logged():
    """Hashes of text differ between processes, hits and scores do not. Progress bars and loggers stay silent."""
    program = (
        "import logging; logging.basicConfig(level=0)\n"
        "from mtrl.retrieval import Passage, make_retriever\n"
        "texts = [' '.join('abcdefgh'[j] * 2 for j in range(8) if i >> j & 1) for i in range(256)]\n"
        "passages = [Passage(str(i), '', text) for i, text in enumerate(texts)]\n"
        "for kind, options in (('bm25', {}), ('dense', {'dimension': 8})):\n"  # so that features collide
        "    hits = make_retriever(kind, passages, **options).search(['aa cc dd', 'hh bb'], 20)\n"
        "    print([[(hit.passage.id, hit.score) for hit in some] for some in hits])\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout) > 500
    assert not [line for run in runs for line in run.stderr.splitlines() if "faiss" not in line]


def test_jax_is_not_imported_where_it_is_installed(tmp_path):
    """JAX takes three quarters of the memory of a GPU when it is first called, which importing bm25s does."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('imported')")
    (tmp_path / "jax" / "lax.py").write_text("def top_k(scores, k):\n    print('called')")
    code = "import mtrl.retrieval.bm25, jax.lax; print('afterwards')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["imported", "afterwards"]
