"""Cells of tables that hold lists and objects as JSON text."""

import pytest

from mtrl.utils.json_cells import from_cell


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ('["a", 1]', ["a", 1]),
        (' {"a": []}\n', {"a": []}),
        ("[1] see below", "[1] see below"),
        ("{a}", "{a}"),
        ('"a"', '"a"'),
        ("12", "12"),
        ('["\\ud800"]', '["\\ud800"]'),
        ("[" * 100_000, "[" * 100_000),
        (["a"], ["a"]),
        (None, None),
    ],
)
def test_only_lists_and_objects_are_parsed(cell, value):
    assert from_cell(cell) == value
