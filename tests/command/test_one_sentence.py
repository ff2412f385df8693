"""Errors that a user can correct end a program with one sentence (`mtrl/command/program.py`)."""

import pytest

from mtrl.command.program import one_sentence
from mtrl.record.run import Run


def test_a_path_that_is_too_long_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"), one_sentence():
        Run.open("a" * 300)
    assert capsys.readouterr().err == f"{'a' * 80}… is too long for the name of a file; give a shorter one\n"


def test_other_errors_of_files_keep_their_traceback():
    with pytest.raises(ConnectionResetError), one_sentence():
        raise ConnectionResetError("a bug")
