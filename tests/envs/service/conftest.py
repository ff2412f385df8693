"""The generated rows of the service desk."""

import pytest

from envs.service import FAMILY
from mtrl.config.schema import DataConfig


@pytest.fixture(scope="session")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=600, synthetic_test_rows=120), seed=0)
