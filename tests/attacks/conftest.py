"""Fixture `outside`: targets of attacks, which are checked again after the tests of each module."""

import uuid

import pytest
from attack_kit import Outside


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    outside = Outside(tmp_path_factory.mktemp("outside"), f"mtrl{uuid.uuid4().hex[:12]}")
    yield outside
    outside.check()
    outside.check_files()
    outside.close()
