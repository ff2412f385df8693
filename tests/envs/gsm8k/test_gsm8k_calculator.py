"""The calculator agrees with Python on the expressions that it accepts, and rejects all others."""

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.gsm8k.calculator import MAX_DEPTH, CalculatorError, calculate

numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", " - ", " * "]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-({text})"),
    ),
    max_leaves=7,
)


@given(expressions)
def test_whole_numbers_agree_with_python(expression):
    assert calculate(expression) == str(eval(expression))


@given(st.integers(-999, 999), st.integers(1, 999), st.integers(1, 999))
def test_division_agrees_with_exact_fractions(a, b, c):
    value = Fraction(a, b) / c
    assert float(calculate(f"{a}/{b}/{c}")) == pytest.approx(float(value), rel=1e-9, abs=1e-30)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+3*7", "33"),
        (" ( 12 + 3 ) * 7 ", "105"),
        ("2-3", "-1"),
        ("-2*-3", "6"),
        ("8/2/2", "2"),
        ("10/4", "2.5"),
        ("10/3", "3.333333333"),
        ("2/3*3", "2"),
        ("0.1+0.2", "0.3"),
        (".5*4", "2"),
        ("3.*2", "6"),
        ("1000000/3", "333333.3333"),
        ("1/1000000", "0.000001"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "incomplete"),
        ("1+", "incomplete"),
        ("*2", "unexpected"),
        ("1 2", "unexpected 2"),
        ("2**9999999", "unexpected"),
        ("9^9", "unexpected"),
        ("1e999", "unexpected"),
        ("1,000+1", "unexpected ,"),
        ("x+1", "unexpected x"),
        ("__import__('os')", "unexpected _"),
        ("(1).real", "unexpected"),
        ("1if 1else 2", "unexpected i"),
        ("1_000", "unexpected _"),
        ("\u0663+\u0661", "unexpected"),
        ("(1+2", r"missing \)"),
        ("1+2)", r"unexpected \)"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("9" * 31, "too large"),
        ("*".join(["9" * 20] * 9), "too large"),
        ("1+" * 1000 + "1", "too long"),
        ("(" * 150 + "1", "nested too deep"),
        ("-" * 150 + "1", "nested too deep"),
    ],
)
def test_all_other_text_gives_an_error_message(expression, reason):
    started = time.perf_counter()
    with pytest.raises(CalculatorError, match=reason):
        calculate(expression)
    assert time.perf_counter() - started < 5, "work that grows faster than the expression"


def test_the_allowed_depth_is_reached():
    assert calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == "1"


@given(st.text(max_size=40))
def test_any_text_gives_a_value_or_a_calculator_error(text):
    with contextlib.suppress(CalculatorError):
        calculate(text)
