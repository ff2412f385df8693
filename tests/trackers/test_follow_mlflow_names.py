"""Names and texts for MLflow, and their conversion back."""

import pytest
from follow_runs import HOSTILE
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.trackers.mlflow_names import LONGEST_TEXT, plain_name, presentable, safe_name, short_text
from tests.packages import need

need("mlflow")

LONG = "x" * (LONGEST_TEXT + 1000)


@given(st.one_of(st.text(max_size=40), st.text(alphabet="./x0a4@ -_:é", max_size=20)))
@settings(max_examples=500)
def test_names_of_metrics_are_converted_without_loss(name):
    from mlflow.utils.validation import _validate_metric_name

    safe = safe_name(name)
    if name:
        _validate_metric_name(safe)
    assert plain_name(safe) == name


@pytest.mark.parametrize("name", ["val/reward/pass_k_8", "rollout/tokens/response_p95", "analysis/logprob_drift/max"])
def test_our_own_names_stay_as_they_are(name):
    assert safe_name(name) == name


def test_cut_texts_name_the_file_of_the_whole_text():
    cut = presentable({"content": LONG, "n": [float("nan"), 1]}, "trajectories/a.jsonl line 3")
    assert "1,000 characters left out; the whole is in trajectories/a.jsonl line 3" in cut["content"]
    assert cut["n"] == ["nan", 1]
    assert presentable(HOSTILE, "").encode()
    assert len(short_text(LONG, 250)) == 250
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert "nested deeper" in str(presentable(deep, "a"))
