import re
import shutil

import pytest

from mtrl.config import keys
from mtrl.config.dialects import FRAMEWORKS
from scripts import write_reference


def test_the_documents_match_the_code(capsys):
    assert write_reference.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def copy(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    shutil.copytree(write_reference.DOCS, docs)
    monkeypatch.setattr(write_reference, "DOCS", docs)
    return docs


def test_stale_documents_are_reported_and_written(copy, capsys):
    page = copy / "configuration.md"
    whole = page.read_text(encoding="utf-8")
    page.write_text(whole.replace("`generator.max_turns`", "`generator.turns`"), encoding="utf-8")
    assert write_reference.main(["--check"]) == 1
    assert "docs/configuration.md" in capsys.readouterr().out
    assert write_reference.main([]) == 0
    assert page.read_text(encoding="utf-8") == whole


def test_every_key_and_every_foreign_name_has_a_row():
    configuration, names = write_reference.configuration(), write_reference.names()
    for section in (key for key in keys.all_keys().values() if key.is_section):
        page = configuration.partition(f"## `{section.path}`\n")[2].partition("\n## ")[0]
        shared = re.search(r"are those of `([\w.]+)`", page)
        for key in write_reference.scalars(section):
            home = f"{shared[1]}.{key.path.rpartition('.')[2]}" if shared else key.path
            assert f"| `{home}` |" in configuration
    for entries in FRAMEWORKS.values():
        for theirs, ours in entries.items():
            assert (f"`{theirs}`" in names) or theirs.rpartition(".")[2] == ours.rpartition(".")[2]
    assert "| `generator.max_turns` | integer | `5` |" in configuration


def test_keys_of_a_base_class_have_their_descriptions():
    assert "| `generator.vllm.replicas` | integer | `1` | Number of servers" in write_reference.configuration()


def test_sections_of_one_class_share_a_table_and_name_their_other_defaults():
    configuration = write_reference.configuration()
    assert "are those of `generator.vllm`.\n" in configuration
    assert "are those of `trainer.optimizer`, except for the default `lr=1e-05`.\n" in configuration


def test_foreign_keys_with_one_answer_share_a_row():
    entries = {"a.lr": "trainer.optimizer.lr", "b": "set seed", "a.learning_rate": "trainer.optimizer.lr"}
    assert write_reference.inverted(entries) == {"trainer.optimizer.lr": "`a.lr`, `a.learning_rate`", "set seed": "`b`"}
