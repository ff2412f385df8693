"""Fixtures `row` and `full_row`: one row of the word problems, for the tests of agents. The second has a system
message, as rows for pretrained models have."""

import pytest

from examples.agents.word_problems import FAMILY
from mtrl.config.schema import DataConfig


@pytest.fixture(scope="module")
def row():
    return FAMILY.load(DataConfig(synthetic_train_rows=4, synthetic_test_rows=2), seed=0).train[0]


@pytest.fixture(scope="module")
def full_row():
    return FAMILY.load(DataConfig(synthetic_train_rows=4, synthetic_test_rows=2), seed=0, prompt="full").train[0]
