"""Sizes with a unit: the units are exact, and other texts are an error with the fix."""

import pytest

from mtrl.config.byte_count import byte_count


@pytest.mark.parametrize(
    ("text", "count"), [("2GiB", 2**31), ("1.5 GB", 1_500_000_000), ("512KiB", 2**19), ("3TB", 3 * 10**12)]
)
def test_a_size_is_a_number_of_bytes(text, count):
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["2", "2G", "-1GiB", "0GiB", "GiB", "2GiB ", "1e3MB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a size; write a number above 0 and a unit \(KiB, KB,.*such as 2GiB"):
        byte_count(text)
