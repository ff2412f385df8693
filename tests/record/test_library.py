"""The search for runs; `tests/view/test_view_index.py` has the tests of what a viewer shows of them."""

from pathlib import Path

from mtrl.record.library import find_runs


def test_a_folder_of_another_user_does_not_end_the_search(tmp_path, monkeypatch):
    for name in ("private", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    is_file = Path.is_file

    def refused(path):
        """Root may read every folder, so the error of other users is made here."""
        if path.parent.name == "private":
            raise PermissionError
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert list(find_runs(tmp_path)) == [tmp_path / "run"]
