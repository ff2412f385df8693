"""The folder of the cache."""

from pathlib import Path

import pytest

from mtrl.errors import UserError
from mtrl.utils.files import cache_folder


def test_a_user_without_a_home_folder_names_the_cache(monkeypatch):
    def unknown(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setenv("MTRL_CACHE", "mine")
    assert cache_folder() == Path("mine")
    monkeypatch.delenv("MTRL_CACHE")
    with pytest.raises(UserError, match="no home folder for the cache; set MTRL_CACHE=FOLDER"):
        cache_folder()
