"""The files of a warm start on a disk that is full, and how many there are."""

import errno
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from mtrl.errors import UserError
from mtrl.trainer.setup import warm_start as module
from mtrl.trainer.setup.warm_start import warm_start
from tests.trainer.warming import Script, config_of, echo_task, started


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A temporary cache."""
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    return tmp_path / "cache"


def full(*_):
    raise OSError(errno.ENOSPC, "no space")


def full_file(dir):
    return Path("/dev/full").open("w+b")


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (module, "TemporaryFile", full_file),  # torch.save hides its error
        (module.tiny, "save", full),
        (module, "replace_text", full),
    ],
)
def test_a_full_cache_is_named(cache, monkeypatch, place, name, instead):
    """The disk is full when a state, the policy or its record is written."""
    monkeypatch.setattr(place, name, instead)
    with pytest.raises(UserError, match=rf"the cache {cache} cannot hold .*No space left.*MTRL_CACHE=FOLDER"):
        started(config_of(), echo_task())


def test_other_errors_of_files_keep_their_class(monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(module.tiny, "save", broken)
    with pytest.raises(OSError, match="broken"):
        started(config_of(), echo_task())


def test_the_files_of_one_state_are_open_at_a_time(monkeypatch):
    """Model, average and optimiser: those of an earlier state are gone before the next ones are written."""
    make, files, counts = module.TemporaryFile, WeakSet(), []

    def counted(**words):
        counts.append(len(files))
        files.add(file := make(**words))
        return file

    monkeypatch.setattr(module, "TemporaryFile", counted)
    warm_start(config_of(success_band=[0.3, 0.6]), echo_task(), Script(0.1, 0.2, 0.4))
    assert counts == [0, 1, 2] * 3
