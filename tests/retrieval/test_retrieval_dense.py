"""Dense retrieval: exact cosines, cached indexes, and encoders."""

import builtins
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.retrieval import Passage, make_retriever
from mtrl.retrieval.dense import DenseRetriever
from mtrl.retrieval.encoders import HashingEncoder, make_encoder

TEXTS = st.lists(st.sampled_from(["river", "rivers", "bridge", "1809", "x", "ünder"]), max_size=6).map(" ".join)
CORPORA = st.lists(TEXTS, min_size=1, max_size=12).map(
    lambda texts: [Passage(str(index), "", text) for index, text in enumerate(texts)]
)


class TableEncoder:
    """An encoder with given vectors; the text of a passage is the number of its row."""

    fingerprint = "table"
    state = {}  # noqa: RUF012

    def __init__(self, rows):
        self.rows = np.asarray(rows, np.float32)

    def fit(self, passages):
        pass

    def encode_passages(self, passages):
        return self.rows[[int(passage) for passage in passages]]

    encode_queries = encode_passages


def cosine(first, second):
    """Return the cosine by the plain formula."""
    return sum(a * b for a, b in zip(first, second, strict=True)) / math.sqrt(
        sum(a * a for a in first) * sum(b * b for b in second)
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 45))
def test_hits_are_those_of_exact_cosines(seed, count, topk):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count + 1, 8)).round(1) + 0.05
    rows[rng.integers(count + 1, size=count // 3)] = rows[0]  # ties
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    retriever = DenseRetriever([Passage(str(row), "", str(row)) for row in range(count)], TableEncoder(unit))
    (hits,) = retriever.search([str(count)], topk)
    exact = [cosine(unit[count].astype(np.float32).tolist(), row.astype(np.float32).tolist()) for row in unit[:count]]
    assert [hit.score for hit in hits] == pytest.approx(sorted(exact, reverse=True)[:topk], abs=2e-6)
    assert [hit.score for hit in hits] == pytest.approx([exact[int(hit.passage.id)] for hit in hits], abs=2e-6)
    keys = [(-hit.score, int(hit.passage.id)) for hit in hits]
    assert keys == sorted(keys)
    assert {hit.passage.id for hit in hits} >= {str(row) for row in range(count) if exact[row] > hits[-1].score + 2e-6}


def test_many_equal_passages_are_in_corpus_order():
    """FAISS returns fewer passages than are equal, so its own choice among them would be arbitrary."""
    passages = [Passage(str(index), "", "a tower" if index % 3 else "a river") for index in range(300)]
    (hits,) = make_retriever("dense", passages).search(["tower"], 50)
    assert [int(hit.passage.id) for hit in hits] == [index for index in range(300) if index % 3][:50]


@settings(deadline=None, max_examples=60)
@given(CORPORA, TEXTS, st.randoms(use_true_random=False))
def test_the_order_of_the_corpus_affects_only_ties(passages, query, rng):
    shuffled = rng.sample(passages, len(passages))
    options = {"dimension": 64}
    (before,), (after,) = (
        make_retriever("dense", corpus, **options).search([query], 100) for corpus in (passages, shuffled)
    )
    assert {hit.passage.id: hit.score for hit in before} == {hit.passage.id: hit.score for hit in after}
    known = set(query.split()) & {word for passage in passages for word in passage.text.split()}
    assert not known or len(before) == len(passages)


def test_questions_find_their_passages(passages, questions):
    found = make_retriever("dense", passages).search(questions, 1)
    assert sum(hits[0].passage == passage for hits, passage in zip(found, passages, strict=True)) > 0.9 * len(passages)


def test_hits_do_not_depend_on_batches_or_threads(passages, questions):
    retriever = make_retriever("dense", passages)
    together = retriever.search(questions, 5)
    assert [retriever.search([question], 5)[0] for question in questions] == together
    found, start = {}, threading.Barrier(6)

    def ask(number):
        start.wait()
        found[number] = [retriever.search([question], 5)[0] for question in questions[number::2]]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: together[number::2] for number in range(6)}


def test_queries_without_features_have_no_hits(passages):
    retriever = make_retriever("dense", passages)
    assert retriever.search(["", " ", "?!", "\0", "\ud800"], 3) == [[]] * 5
    assert retriever.search([], 3) == []
    assert len(retriever.search(["bridge \ud800\0"], 200)[0]) == len(passages)
    assert make_retriever("dense", [Passage("a", "", "")]).search(["a"], 3) == [[]]


def test_other_forms_of_a_word_are_found():
    passages = [Passage("a", "", "the fortification of the harbour"), Passage("b", "", "a garden with roses")]
    query = ["fortifications"]
    assert make_retriever("dense", passages).search(query, 1)[0][0].passage.id == "a"
    assert make_retriever("dense", passages, ngram_weight=0).search(query, 1) == [[]]


def test_vectors_of_the_hashing_encoder():
    encoder = HashingEncoder(dimension=512)
    texts = ["red red fox", "red dog", "", "blue"]
    encoder.fit(texts)
    vectors = encoder.encode_passages(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (4, 512)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 0, 1])
    assert (vectors[1] == encoder.encode_queries(["Dog, RED!"])[0]).all()
    assert not encoder.encode_queries(["green"]).any()
    # Computed by hand, with words only: red occurs in 2 of 4 passages, fox and dog in one.
    words = HashingEncoder(dimension=2**16, ngram_weight=0)
    words.fit(texts)
    red_red, fox, red, dog = (1 + math.log(2)) * math.log(5 / 2), math.log(5), math.log(5 / 2), math.log(5)
    expected = red_red * red / math.hypot(red_red, fox) / math.hypot(red, dog)
    first, second = words.encode_passages(texts[:2])
    assert float(first @ second) == pytest.approx(expected, rel=1e-5)


def count_encodings(monkeypatch):
    counted = []
    original = HashingEncoder.encode_passages
    monkeypatch.setattr(
        HashingEncoder, "encode_passages", lambda self, texts: counted.append(1) or original(self, texts)
    )
    return counted


def test_an_index_is_reused_for_the_same_corpus_and_encoder_only(passages, questions, tmp_path, monkeypatch):
    encodings = count_encodings(monkeypatch)
    first = make_retriever("dense", passages, index=tmp_path / "index")
    again = make_retriever("dense", passages, index=str(tmp_path / "index"))
    assert len(encodings) == 1
    assert (
        again.search(questions, 5)
        == first.search(questions, 5)
        == make_retriever("dense", passages).search(questions, 5)
    )
    encodings.clear()
    changed = [*passages[:-1], Passage(passages[-1].id, passages[-1].title, "something else")]
    make_retriever("dense", changed, index=tmp_path / "index")
    make_retriever("dense", passages[::-1], index=tmp_path / "index")
    make_retriever("dense", passages, index=tmp_path / "index", dimension=512)
    assert len(encodings) == 3
    folders = list((tmp_path / "index").iterdir())
    assert len(folders) == 4
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"vectors.faiss", "encoder.safetensors", "about.json"}
        assert json.loads((folder / "about.json").read_text())["passages"] == len(passages)


@pytest.mark.parametrize("name", ["vectors.faiss", "encoder.safetensors"])
def test_a_broken_index_is_a_user_error(passages, tmp_path, name):
    make_retriever("dense", passages, index=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / name).write_bytes(b"junk")
    with pytest.raises(UserError, match=f"{folder.name} cannot be read .*delete the folder"):
        make_retriever("dense", passages, index=tmp_path)


def test_an_index_that_cannot_be_written_is_a_user_error(passages, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written"):
        make_retriever("dense", passages, index=tmp_path / "file")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dimension": 0}, "dimension=0 must be at least 1"),
        ({"ngrams": (5, 4)}, r"ngrams=\[5, 4\]"),
        ({"max_length": 3}, "encoder hashing has no option 'max_length'; it has dimension, ngrams, ngram_weight"),
        ({"encoder": "nowhere/at_all_5f3e", "dimension": 3}, "encoder nowhere/at_all_5f3e has no option 'dimension'"),
    ],
)
def test_wrong_options_are_user_errors(passages, options, message):
    with pytest.raises(UserError, match=message):
        make_retriever("dense", passages, **options)


def test_missing_faiss_is_a_user_error_with_the_extra(passages, monkeypatch):
    real = builtins.__import__

    def blocked(name, *rest, **more):
        if name == "faiss":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(
        UserError, match=r"faiss is not installed; install it with: pip install 'mtrl-agents\[search\]'"
    ):
        make_retriever("dense", passages)


def test_a_search_restores_the_number_of_threads(passages):
    import faiss

    before = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(3)
        make_retriever("dense", passages).search(["bridge"], 1)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT with random weights, in two folders; the name of one contains e5."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", "bridge", "river", "tower", "who", "built"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
    )
    folder = tmp_path_factory.mktemp("encoders")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    for name in ("tiny-e5", "tiny-bert"):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


def by_hand(folder, text):
    """Return the normalised mean of the last hidden states of one text, without padding."""
    import torch
    from transformers import AutoTokenizer, BertModel

    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        hidden = BertModel.from_pretrained(folder).eval()(**tokens).last_hidden_state[0].numpy()
    mean = hidden.mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_sentences_are_pooled_over_their_tokens_and_prefixed(bert):
    texts = ["bridge", "who built the tower of the river bridge", "river river"]
    e5 = make_encoder(str(bert / "tiny-e5"), batch_size=2, device="cpu")
    plain = make_encoder(str(bert / "tiny-bert"), device="cpu")
    for text, vector in zip(texts, e5.encode_passages(texts), strict=True):
        assert vector == pytest.approx(by_hand(bert / "tiny-e5", "passage: " + text), abs=1e-5)
    for encoder, prefix in ((e5, "query: "), (plain, "")):
        vectors = encoder.encode_queries(texts)
        assert vectors.dtype == np.float32 and vectors.shape == (3, 16)
        for text, vector in zip(texts, vectors, strict=True):
            assert vector == pytest.approx(by_hand(bert / "tiny-e5", prefix + text), abs=1e-5)
            assert (vector == encoder.encode_queries([text])[0]).all()
    assert not np.allclose(e5.encode_queries(texts), plain.encode_queries(texts), atol=1e-3)


def test_long_texts_are_cut(bert):
    encoder = make_encoder(str(bert / "tiny-bert"), max_length=8, device="cpu")
    first, second = encoder.encode_passages(["river " * 600, "river " * 6])
    assert first == pytest.approx(second, abs=1e-6)


def test_fingerprints_depend_on_weights_and_settings(bert):
    prints = {
        make_encoder(str(bert / name), device="cpu", **options).fingerprint
        for name, options in [
            ("tiny-bert", {}),
            ("tiny-bert", {"batch_size": 7}),
            ("tiny-e5", {}),
            ("tiny-bert", {"max_length": 9}),
            ("tiny-bert", {"passage_prefix": "passage: "}),
        ]
    }
    assert len(prints) == 3


def test_dense_retrieval_with_a_transformer(bert, tmp_path):
    passages = [Passage(str(index), "", text) for index, text in enumerate(["bridge", "river tower", "who built"])]
    options = {"encoder": str(bert / "tiny-bert"), "device": "cpu", "index": tmp_path}
    retriever = make_retriever("dense", passages, **options)
    found = retriever.search(["river tower", " ", "bridge"], 2)
    assert [hits[0].passage.id for hits in (found[0], found[2])] == ["1", "0"] and found[1] == []
    assert found[0][0].score == pytest.approx(1, abs=1e-5)
    assert make_retriever("dense", passages, **options).search(["river tower", " ", "bridge"], 2) == found


@pytest.mark.parametrize(
    "options, message",
    [
        ({"name": "no/such_encoder_5f3e"}, "encoder no/such_encoder_5f3e could not be loaded"),
        ({"name": "tiny-bert", "device": "cuda:99"}, "device=cuda:99 cannot be used"),
        ({"name": "tiny-bert", "batch_size": 0}, "batch_size=0"),
    ],
)
def test_unusable_encoders_are_user_errors(bert, options, message, monkeypatch):
    monkeypatch.chdir(bert)
    with pytest.raises(UserError, match=message) as caught:
        make_encoder(**options)
    assert "\n" not in str(caught.value)
