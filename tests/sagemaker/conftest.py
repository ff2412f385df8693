"""Fixtures that make the tests of SageMaker faster."""

import jsonschema
import pytest

from mtrl.command.compose import compose
from mtrl.sagemaker import source


@pytest.fixture(scope="module", autouse=True)
def _schema_believed():
    """Skip the check of the SDK's own schema, which it repeats a dozen times for each job. Its checks by it remain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonschema.validators.validator_for({}), "check_schema", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module")
def composed_once():
    """Compose equal runs only once, since the faults of jobs in these tests are not in the run."""
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


@pytest.fixture(scope="module")
def packed_once():
    """Pack equal archives of the code only once; `test_sagemaker_entry.py` tests what is in them."""
    kept, pack = {}, source.pack

    def remembered(archive, *words):
        key = str(words)
        if key not in kept:
            pack(archive, *words)
            kept[key] = archive.read_bytes()
        archive.write_bytes(kept[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "pack", remembered)
        yield
