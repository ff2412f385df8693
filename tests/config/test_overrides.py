"""Values as overrides: Hydra reads exactly what was given."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mtrl.config.overrides import quoted, written

TEXTS = (
    *(
        "plain",
        "a/b-c.d",
        "./x",
        "/x",
        "",
        " ",
        "a b",
        "it's",
        "'",
        "a\\",
        "\\",
        "\\d+",
        "a\\\\b",
        "\\'",
        "C:\\new\\'x'\\",
    ),
    *(
        "null",
        "True",
        "nan",
        "Inf",
        ".5",
        "1e3",
        "-1",
        "a,b",
        "[x]",
        "{x: 1}",
        "café",
        "a=b",
        "$x",
        "a\nb\\",
        'say "x"',
    ),
)


@pytest.mark.parametrize("text", TEXTS)
def test_hydra_reads_a_text_unchanged(text):
    parser = OverridesParser.create()
    for word in (f"key={written(text)}", quoted("key", text)):
        assert str(parser.parse_override(word).value()) == text
        assert isinstance(parser.parse_override(f"key={written(text)}").value(), str)


def test_hydra_reads_other_values_unchanged():
    value = {
        "numbers": [1, -0.5, 1e-30, float("inf")],
        "none": None,
        "flags": [True, False],
        "texts": {"a": "b c", "d": "é"},
        "names": {"two words": 1, " a:b, (c)[d]{e}=f\\": 2},
    }
    assert OverridesParser.create().parse_override(f"key={written(value)}").value() == value
