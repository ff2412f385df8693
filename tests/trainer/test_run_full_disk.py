"""A disk that fills up in the middle of a run."""

import errno

import pytest

from mtrl.config.compose import compose
from mtrl.errors import UserError
from mtrl.trainer import run as running


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_it_is_told_in_one_sentence_with_the_command_that_goes_on(tmp_path, monkeypatch, number):
    def full(*_):
        raise OSError(number, "no space")

    monkeypatch.setattr(running, "_train", full)
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=f"no space left for {folder}; free some, .* run_dir={folder} resume=latest"):
        running.train(compose(["experiment=gsm8k", f"run_dir={folder}"]))
    assert "OSError" in (folder / "run.log").read_text(), "where it was"


def test_other_errors_keep_their_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(running, "_train", broken)
    with pytest.raises(OSError, match="broken"):
        running.train(compose(["experiment=gsm8k", f"run_dir={tmp_path / 'run'}"]))
