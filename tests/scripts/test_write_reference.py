import shutil

import pytest

from mtrl.config import keys
from mtrl.config.dialects import FRAMEWORKS
from scripts import write_reference


def test_the_documents_are_what_the_code_says(capsys):
    assert write_reference.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def copy(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    shutil.copytree(write_reference.DOCS, docs)
    monkeypatch.setattr(write_reference, "DOCS", docs)
    return docs


def test_what_is_stale_is_told_and_written(copy, capsys):
    page = copy / "configuration.md"
    whole = page.read_text(encoding="utf-8")
    page.write_text(whole.replace("`generator.max_turns`", "`generator.turns`"), encoding="utf-8")
    assert write_reference.main(["--check"]) == 1
    assert "docs/configuration.md" in capsys.readouterr().out
    assert write_reference.main([]) == 0
    assert page.read_text(encoding="utf-8") == whole


def test_every_key_and_every_foreign_name_is_there():
    configuration, names = write_reference.configuration(), write_reference.names()
    for key in keys.all_keys().values():
        assert f"## `{key.path}`" in configuration if key.is_section else f"| `{key.path}` |" in configuration
    for entries in FRAMEWORKS.values():
        assert all(f"| `{theirs}` |" in names for theirs in entries)
    assert "| `generator.max_turns` | an integer | `5` |" in configuration


def test_messages_have_their_texts(tmp_path):
    source = """
def check(value):
    said = f"a.b={value} is too large"
    if value > 3:
        raise UserError(said + "; lower it")
    raise UserError(f"`{value}` is nothing: {'take ' + 'another' if value else 'one'}")
"""
    (tmp_path / "m.py").write_text(source)
    found = list(write_reference.sentences(tmp_path / "m.py"))
    assert found == ["`a.b=… is too large; lower it`", "`` `…` is nothing: … ``"]
