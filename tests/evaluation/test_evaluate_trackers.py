"""An evaluation reports to the trackers that its configuration names, as a run does."""

import pytest

from tests.evaluation.outputs import metrics_of


@pytest.mark.slow  # MLflow makes its database
def test_numbers_and_trajectories_arrive_in_mlflow(evaluate, run, tmp_path):
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    done = evaluate(
        *(run, "evaluation.compare=[base]", "evaluation.rows=3", "evaluation.sampled_rows=0"),
        *("evaluation.samples_per_row=1", "evaluation.output=out", "tracker=mlflow", f"tracker.mlflow.uri={store}"),
    )
    assert done.status == 0 and not done.err
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'mtrl'")
    (there,) = client.search_runs([experiment.experiment_id])
    assert there.info.status == "FINISHED"
    rows = {row["step"]: row for row in metrics_of(tmp_path / "out")}
    for name, step in (("val/success/mean", 2), ("base/val/success/mean", 0)):
        (found,) = client.get_metric_history(there.info.run_id, name)
        assert (found.step, found.value) == (step, rows[step][name])
    traces = client.search_traces(locations=[experiment.experiment_id], max_results=100)
    assert len(traces) == 6
    assert "report.html" in {file.path for file in client.list_artifacts(there.info.run_id)}
