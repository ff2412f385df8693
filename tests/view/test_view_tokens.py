"""Token ids as text: characters over several tokens, special tokens, other kinds of tokenizers, broken files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.record.tokens import Tokenizer, byte_alphabet, characters, find_tokenizer
from mtrl.view.detail import roles_of

SPECIAL = {"id": 256, "content": "<|end|>", "special": True}
ADDED = {"id": 257, "content": "<calc>", "special": False}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def write(path, vocab, decoder, added=(), byte_fallback=False):
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": byte_fallback, "unk_token": None}
    path.parent.mkdir(parents=True, exist_ok=True)
    if decoder["type"] == "ByteLevel":
        decoder = {**decoder, "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tree = {"version": "1.0", "added_tokens": [{**a, **FLAGS} for a in added], "decoder": decoder, "model": model}
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with one token per byte, which is the hardest case."""
    path = tmp_path_factory.mktemp("run") / "tokenizer" / "tokenizer.json"
    vocab = {char: byte for char, byte in byte_alphabet().items()}
    return Tokenizer(write(path, vocab, {"type": "ByteLevel"}, [SPECIAL, ADDED]))


def ids(text):
    return list(text.encode())


@pytest.mark.parametrize("char", ["é", "中", "🤖"])
def test_a_character_belongs_to_the_token_where_it_begins(tokenizer, char):
    size = len(char.encode())
    found = tokenizer.pieces([*ids("a"), *ids(char), *ids("b")])
    assert found.texts == ["a", char, *[""] * (size - 1), "b"]
    assert found.continued == list(range(2, 1 + size))
    assert found.special == []


def test_emoji_of_several_characters(tokenizer):
    text = "👩‍👩‍👧 你好"
    found = tokenizer.pieces(ids(text))
    assert "".join(found.texts) == text
    assert [place for place, piece in enumerate(found.texts) if not piece] == found.continued


def test_a_broken_character_is_shown_at_its_bytes(tokenizer):
    robot = ids("🤖")
    found = tokenizer.pieces([*robot[:2], *ids("x"), *robot[2:], *robot])
    assert found.texts[:5] == ["�", "�", "x", "�", "�"]
    assert found.texts[5:] == ["🤖", "", "", ""]


def test_special_tokens_stay_visible_and_part_characters(tokenizer):
    robot = ids("🤖")
    found = tokenizer.pieces([*robot[:2], 256, 257, *robot[2:]])
    assert found.texts == ["�", "�", "<|end|>", "<calc>", "�", "�"]
    assert found.special == [2]


def test_unknown_ids_are_shown_as_numbers(tokenizer):
    found = tokenizer.pieces([97, 99999, -3, 2**70])
    assert found.texts == ["a", "<99999>", "<-3>", f"<{2**70}>"]
    assert found.special == [1, 2, 3]


def test_hostile_text_stays_text(tokenizer):
    text = "</script>\x1b[31m\u202e"
    assert "".join(tokenizer.pieces(ids(text)).texts) == text


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.integers(0, 257), max_size=40))
def test_pieces_joined_are_the_whole(tokenizer, data):
    """The joined text is that of the bytes, and every token has text or continues a character."""
    found = tokenizer.pieces(data)
    joined = b"".join({256: b"<|end|>", 257: b"<calc>"}.get(i, bytes([i % 256])) for i in data)
    assert "".join(found.texts) == "".join(char for char, _ in characters(joined))
    assert [place for place, text in enumerate(found.texts) if not text] == found.continued


@settings(deadline=None)
@given(text=st.text(max_size=20))
def test_all_of_unicode(tokenizer, text):
    assert "".join(tokenizer.pieces(ids(text)).texts) == text


def test_byte_fallback(tmp_path):
    vocab = {"▁a": 0, "<0xF0>": 1, "<0x9F>": 2, "<0xA4>": 3, "<0x96>": 4, "b": 5}
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                {"type": "ByteFallback"}, {"type": "Fuse"}]}  # fmt: skip
    tokenizer = Tokenizer(write(tmp_path / "t" / "tokenizer.json", vocab, decoder, byte_fallback=True))
    found = tokenizer.pieces([0, 1, 2, 3, 4, 5, 0])
    assert found.texts == [" a", "🤖", "", "", "", "b", " a"]
    assert found.continued == [2, 3, 4]


def test_word_pieces(tmp_path):
    vocab = {"play": 0, "##ing": 1, "chess": 2}
    path = write(tmp_path / "t" / "tokenizer.json", vocab, {"type": "WordPiece", "prefix": "##", "cleanup": True})
    assert Tokenizer(path).pieces([0, 1, 2]).texts == [" play", "ing", " chess"]


def test_the_tokenizer_of_a_run_comes_before_that_of_its_export(tmp_path):
    assert find_tokenizer(tmp_path) == (None, [])
    write(tmp_path / "export" / "tokenizer.json", {"a": 0}, {"type": "ByteLevel"})
    assert find_tokenizer(tmp_path)[0].pieces([0]).texts == ["a"]
    write(tmp_path / "tokenizer" / "tokenizer.json", {"b": 0}, {"type": "ByteLevel"})
    assert find_tokenizer(tmp_path)[0].pieces([0]).texts == ["b"]
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{broken")
    found, problems = find_tokenizer(tmp_path)
    assert found.pieces([0]).texts == ["a"]
    assert len(problems) == 1 and problems[0].startswith("tokenizer/tokenizer.json is no tokenizer")


def test_tokens_have_the_roles_of_their_messages():
    texts = ["<|sys|>", "be", " brief", "<|user|>", "how", " many", "?", "<|end|>", "<|assistant|>"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many?"}]
    assert roles_of(texts, messages) == [[1, "template"], [2, "system"], [1, "template"], [3, "user"], [2, "template"]]


def test_tokens_of_a_split_character_have_its_role():
    assert roles_of(["[", "中", "", "", "]"], [{"role": "tool", "content": "中"}]) == [
        [1, "template"], [3, "tool"], [1, "template"]
    ]  # fmt: skip


def test_text_that_the_template_changed_has_the_role_template():
    assert roles_of(["a", "b"], [{"role": "user", "content": "other"}]) == [[2, "template"]]
    assert roles_of([], []) == []
