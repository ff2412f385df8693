"""Corpora: all forms of files are read, and errors name file and line."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.retrieval import Passage, load_corpus
from mtrl.retrieval.passage import document_of, passage_of


def write(folder, name, content):
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


WIKI = [
    {"id": "0", "contents": '"Ada Lovelace"\nShe wrote notes.\nMany of them.'},
    {"id": 1, "contents": "Zürich\nA town."},
    {"id": "x", "contents": "no title at all"},
]
READ = [
    Passage("0", "Ada Lovelace", "She wrote notes.\nMany of them."),
    Passage("1", "Zürich", "A town."),
    Passage("x", "", "no title at all"),
]


@pytest.mark.parametrize("name", ["wiki.jsonl", "wiki.jsonl.gz", "wiki.json", "wiki.json.gz"])
def test_rows_one_per_line(tmp_path, name):
    """Rows have the form of wiki-18, whose file on the Hub ends in .json."""
    assert load_corpus(write(tmp_path, name, lines(*WIKI))) == READ
    assert load_corpus(str(write(tmp_path, name, b"\xef\xbb\xbf\n" + lines(*WIKI).encode() + b"\n\n"))) == READ


def test_a_list_of_rows_with_text_and_without_ids(tmp_path):
    rows = [{"title": "A", "text": "a"}, {"title": None, "text": "b"}, {"text": "c", "contents": "not\nthis"}]
    found = load_corpus(write(tmp_path, "rows.json", json.dumps(rows)))
    assert found == [Passage("0", "A", "a"), Passage("1", "", "b"), Passage("2", "", "c")]
    assert load_corpus(write(tmp_path, "row.json", json.dumps(rows[0], indent=1))) == found[:1]


def test_the_form_of_squad(tmp_path):
    paragraphs = [{"context": "first", "qas": [{"question": "?"}]}, {"context": "second", "qas": []}]
    data = [
        {"title": "Super_Bowl_50", "paragraphs": paragraphs},
        {"title": "Beyonc%C3%A9", "paragraphs": [{"context": "third"}]},
        {"paragraphs": [{"context": "fourth"}]},
    ]
    for indent in (None, 2):
        found = load_corpus(write(tmp_path, "squad.json", json.dumps({"version": "1.1", "data": data}, indent=indent)))
        assert [(one.id, one.title, one.text) for one in found] == [
            ("0", "Super Bowl 50", "first"),
            ("1", "Super Bowl 50", "second"),
            ("2", "Beyoncé", "third"),
            ("3", "", "fourth"),
        ]


WRONG = {
    "broken line": ("c.jsonl", lines(WIKI[0]) + '{"id": 2,\n', "c.jsonl, line 2: not JSON"),
    "blank lines count": ("c.jsonl", "\n\n[1]\n", "c.jsonl, line 3: a list, not an object"),
    "not UTF-8": ("c.jsonl", b'{"text": "\xff"}\n', "c.jsonl, line 1: not JSON in UTF-8"),
    "nested": ("c.jsonl", '{"a":' * 50000, "c.jsonl, line 1: not JSON"),
    "no text": ("c.jsonl", lines(WIKI[0], {"id": "2"}), "line 2: neither a text under 'text' nor"),
    "text is a number": ("c.jsonl", lines({"text": 3}), "line 1: 'text' is a int, not text"),
    "title is a list": ("c.jsonl", lines({"title": [], "text": "a"}), "line 1: 'title' is a list"),
    "id is true": ("c.jsonl", lines({"id": True, "text": "a"}), "line 1: 'id' is a bool"),
    "half a surrogate pair": ("c.jsonl", '{"text": "a\\ud800"}', "line 1: 'text' holds half of a surrogate pair"),
    "an id twice": ("c.jsonl", lines(WIKI[0], WIKI[1], WIKI[0]), "line 3: id '0' occurs in line 1 already"),
    "a position as id": ("c.jsonl", lines({"id": "1", "text": "a"}, {"text": "b"}), "line 2: id '1' occurs in line 1"),
    "empty": ("c.jsonl", "\n", "has no passages"),
    "empty list": ("c.json", "[]", "has no passages"),
    "element": ("c.json", '[{"text": "a"}, 3]', "c.json, element 1: a int"),
    "broken in the middle": ("c.json", '{\n "data": [\n  {"title": }\n]}', "c.json, line 3: not JSON"),
    "line of a .json": ("c.json", lines(*WIKI[:2]) + "{", "c.json, line 3: not JSON"),
    "no paragraphs": ("c.json", '{"data": [{"title": "a"}]}', r"c.json, data\[0\]: no list of paragraphs"),
    "no context": ("c.json", '{"data": [{"paragraphs": [{}]}]}', r"data\[0\].paragraphs\[0\]: 'text' is a NoneType"),
    "title of squad": ("c.json", '{"data": [{"title": 1, "paragraphs": [{"context": "a"}]}]}', "'title' is a int"),
    "suffix": ("c.txt", "a", "c.txt must end in one of .jsonl"),
}


@pytest.mark.parametrize("name, content, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_rows_are_user_errors_with_their_place(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        load_corpus(write(tmp_path, name, content))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:30]], ids=["other", "cut"]
)
def test_broken_archives_are_user_errors(tmp_path, content):
    (tmp_path / "c.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match="c.jsonl.gz cannot be read"):
        load_corpus(tmp_path / "c.jsonl.gz")


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="none.jsonl cannot be read .No such file"):
        load_corpus(tmp_path / "none.jsonl")


TEXT = st.text(max_size=20)


@given(TEXT, TEXT, TEXT)
def test_documents_are_read_as_they_were_written(identifier, title, text):
    passage = Passage(identifier, title, text)
    assert passage.contents == f"{title}\n{text}"
    assert passage_of(json.loads(json.dumps(document_of(passage))), default_id="other") == passage
