"""A path that begins with `~USER`, where the machine has no such user, is a path that does not exist."""

from pathlib import Path

import pytest

from mtrl.api import check_is_run
from mtrl.environments.replay import Recordings
from mtrl.errors import UserError
from mtrl.evaluation.sources import source_of
from mtrl.notebook import load
from mtrl.retrieval.corpus import load_corpus
from mtrl.sandbox.sql import SqlSandbox
from mtrl.utils.files import in_home

NOWHERE = "~nobody-here/mine.jsonl"
READERS = (SqlSandbox.from_path, Recordings.from_jsonl, load_corpus, load, source_of, check_is_run)


def test_the_home_folder_of_a_user():
    assert in_home("~/runs") == Path.home() / "runs" and in_home("runs/~") == Path("runs/~")
    assert in_home(NOWHERE) == Path(NOWHERE)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__qualname__)
def test_a_file_of_an_unknown_user_does_not_exist(read):
    with pytest.raises(UserError, match=NOWHERE):
        read(NOWHERE)
