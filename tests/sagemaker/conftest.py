"""What saves the tests of SageMaker time."""

import jsonschema
import pytest

from mtrl.command.compose import compose


@pytest.fixture(scope="module", autouse=True)
def _schema_believed():
    """The SDK checks its own schema of configurations a dozen times for each job; what it checks by it still counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonschema.validators.validator_for({}), "check_schema", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module")
def composed_once():
    """The same run is composed once: what is wrong with a job is not in it."""
    kept = {}

    def remembered(words):
        key = tuple(words)
        if key not in kept:
            kept[key] = compose(words)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("job", "managed"):
            patch.setattr(f"mtrl.sagemaker.{module}.compose", remembered)
        yield
