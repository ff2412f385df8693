import pytest
import yaml

from scripts import build_docs

pytest.importorskip("material", reason="needs pip install 'mtrl-agents[docs]'")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path, capfd):
    assert build_docs.main(["--site", str(tmp_path / "site")]) == 0, capfd.readouterr().err
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "docs/guide/index.html", "docs/configuration/index.html", "examples/sop/index.html"} <= pages
    assert "<svg" in (tmp_path / "site" / "docs" / "architecture.svg").read_text()


def test_a_link_that_leads_nowhere_is_an_error(tmp_path, monkeypatch, capfd):
    gather = build_docs.gather

    def broken(folder):
        config = yaml.safe_load(gather(folder).read_text(encoding="utf-8"))
        (folder / "page").mkdir()
        (folder / "page" / "index.md").write_text("# A page\n\n[gone](nowhere.md)\n", encoding="utf-8")
        written = folder / "page.yml"
        written.write_text(yaml.safe_dump({**config, "docs_dir": "page", "nav": ["index.md"]}), encoding="utf-8")
        return written

    monkeypatch.setattr(build_docs, "gather", broken)
    assert build_docs.main(["--site", str(tmp_path / "site")]) != 0
    told = capfd.readouterr().err
    assert "'nowhere.md'" in told and told.count("WARNING") == 1, "no other reason"


def test_showing_it_ends_quietly(monkeypatch, capfd):
    """Ctrl-C ends the server without output."""

    def interrupted(command, env):
        assert command[3] == "serve"
        raise KeyboardInterrupt

    monkeypatch.setattr(build_docs.subprocess, "run", interrupted)
    try:
        status = build_docs.main(["--serve"])
    except KeyboardInterrupt:
        pytest.fail("it ends with a traceback")
    assert status == 130 and capfd.readouterr().out == ""


def test_every_page_is_in_the_navigation():
    named = yaml.safe_load((build_docs.ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    linked = {page for entry in named for pages in entry.values() for page in leaves(pages)}
    assert linked >= {f"docs/{path.name}" for path in (build_docs.ROOT / "docs").glob("*.md")}


def leaves(pages):
    return [pages] if isinstance(pages, str) else [page for entry in pages for page in entry.values()]
