"""Text for terminals: harmless, short, aligned."""

import pytest

from mtrl.utils.text import clean, cut, duration, one_line, short, signed


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb", "a\\rb"),
        ("a\x07\x08", "a\\x07\\x08"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp", "\\u202egnp"),
        ("\u200bhidden\ufeff", "\\u200bhidden\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\u2028", "\\u2028"),
        ("[red]x[/red]\ttab\r\nnext", "[red]x[/red]    tab\nnext"),
        ("é 漢字 🙂 – ok", "é 漢字 🙂 – ok"),
        ("a\u034fb\u115f\u1160\u17b4\u180b\u180f", "a\\u034fb\\u115f\\u1160\\u17b4\\u180b\\u180f"),
        ("\u2800\u3164\uffa0", "\\u2800\\u3164\\uffa0"),
        ("x\ufe00y\U000e0100z\U000e01ef", "x\\ufe00y\\U000e0100z\\U000e01ef"),
        ("❤\ufe0f ☎\ufe0e 1\ufe0f\u20e3", "❤\ufe0f ☎\ufe0e 1\ufe0f\u20e3"),  # ordinary emoji
        ("❤\ufe0f\ufe0f \ufe0e\n\ufe0f", "❤\ufe0f\\ufe0f \\ufe0e\n\\ufe0f"),
        ("\ufe0f\u3164\ufe0f\u200b\ufe0e", "\\ufe0f\\u3164\\ufe0f\\u200b\\ufe0e"),
    ],
)
def test_unsafe_characters_are_replaced(hostile, shown):
    assert clean(hostile) == shown


def test_cut_removes_the_middle():
    assert cut("short", 10, 3) == "short"
    assert cut("a" * 50 + "b" * 50, 10, 3) == "aaaaa … 90 characters … bbbbb"
    assert cut("\n".join("123456"), 99, 4) == "1\n2\n… 2 lines …\n5\n6"


def test_one_line_has_no_line_breaks():
    assert one_line("a\nb\x1b") == "a b\\x1b"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0s"), (1.84, "1.8s"), (9.96, "10s"), (59.7, "1m00s"), (192.3, "3m12s"), (3900, "1h05m")],
)  # fmt: skip
def test_durations_are_formatted(seconds, shown):
    assert duration(seconds) == shown


def test_numbers_are_formatted():
    assert [short(3), short(2.714), short(0.5625), short(12345.6)] == ["3", "2.71", "0.562", "12,346"]
    assert [signed(-0.001), signed(1), signed(-0.1)] == ["+0.00", "+1.00", "-0.10"]
