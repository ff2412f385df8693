"""Versions on the machines of rollout workers: each difference that can change tokens is named."""

import pytest

from mtrl.errors import UserError
from mtrl.rollout.installation import check_versions
from mtrl.utils.provenance import versions


def test_the_same_versions_pass_with_and_without_an_engine():
    check_versions({**versions(), "vllm": "0.20.0"}, versions() | {"sglang": "0.6"})


def test_all_differences_are_in_one_sentence():
    leader = {"python": "3.11.7", "mtrl": "0.1.0", "torch": "2.13.0", "tokenizers": "0.23"}
    worker = {"python": "3.11.7", "mtrl": "0.2.0", "torch": "2.12.1", "renderers": "0.1"}
    expected = (
        "this machine has mtrl 0.2.0 instead of 0.1.0, renderers 0.1 instead of none, tokenizers none instead of 0.23, "
        "torch 2.12.1 instead of 2.13.0; install the versions that rank 0 has"
    )
    with pytest.raises(UserError) as error:
        check_versions(leader, worker)
    assert str(error.value) == expected
