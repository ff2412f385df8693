"""Checksums name the files of a folder that have changed."""

import os
import subprocess

import pytest

from mtrl.record.checksums import SUMS, changes, damage, write_checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("a.json", "b with a space\u2028.jsonl", "below/c.json"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path, [file for file in tmp_path.rglob("*") if file.is_file()])
    return tmp_path


def test_sha256sum_can_check_the_checksums(folder):
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 3
    assert changes(folder) is None


def test_changed_and_missing_files_are_named(folder):
    (folder / "a.json").write_text("b.json")
    (folder / "below/c.json").unlink()
    assert changes(folder) == (f"below/c.json: missing; a.json: not as it was written, by its checksum in {SUMS}")
    assert changes(folder, "below/") == "below/c.json: missing"
    assert changes(folder, "b with") is None


def test_files_that_were_added_later_are_no_change(folder):
    (folder / "notes.txt").write_text("mine")
    assert changes(folder) is None


def test_a_folder_without_checksums_reports_no_change(tmp_path):
    (tmp_path / "a.json").write_text("a")
    assert changes(tmp_path) is None


@pytest.mark.parametrize("text", ["not a checksum\n", "0123  a.json\n", "\x00"])
def test_an_invalid_list_of_checksums_is_reported(folder, text):
    (folder / SUMS).write_text(text)
    assert changes(folder) == f"{SUMS}, line 1, is not a checksum and a name"
    (folder / SUMS).write_bytes(b"\xff\xfe")
    assert changes(folder) == f"{SUMS} is no text"


def test_pipes_of_another_person_are_not_read(tmp_path):
    """Reading one would never end."""
    (tmp_path / "a.json").write_text("a")
    write_checksums(tmp_path, [tmp_path / "a.json"])
    (tmp_path / "a.json").unlink()
    os.mkfifo(tmp_path / "a.json")
    assert damage(tmp_path) == "a.json is missing" and changes(tmp_path) == "a.json: missing"
    (tmp_path / SUMS).unlink()
    os.mkfifo(tmp_path / SUMS)
    assert damage(tmp_path) == changes(tmp_path) == f"{SUMS} is no regular file"
