"""The test that the ledger names; the others are in test_plots.py."""

from mtrl.tracking.plots import curves_figure


def test_six_panels_two_with_a_second_scale(rows):
    """They have become eight."""
    assert len(curves_figure(rows, "").axes) == 10
