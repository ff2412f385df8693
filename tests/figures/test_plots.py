"""curves.png: the panels and their content."""

import subprocess
import sys

import pytest
from matplotlib.image import imread

from mtrl.figures.plots import curves_figure, draw_curves

TITLES = [
    "held out: success and reward",
    "training: success and reward",
    "how episodes end",
    "length of an episode",
    "groups without a signal",
    "entropy of the policy",
    "drift of log-probs, engine to trainer",
    "speed",
]


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def words(axes):
    return [text.get_text() for text in axes.texts]


def test_eight_panels_two_with_a_second_scale(rows):
    figure = curves_figure(rows, "title")
    assert list(panels(figure)) == TITLES and len(figure.axes) == 10
    assert figure.get_suptitle() == "title"


def test_held_out_success_has_its_interval(rows):
    axes = panels(curves_figure(rows, ""))["held out: success and reward"]
    assert sorted(legend(axes)) == ["reward", "success, greedy", "success, sampled"]
    greedy = next(bar for bar in axes.containers if bar.get_label() == "success, greedy")
    assert greedy.has_yerr
    assert list(greedy.lines[0].get_xdata()) == [0, 6, 12]


def test_claims_and_the_lenient_share_are_in_the_panel_of_reward_and_success(rows):
    for row in rows[1:]:
        row |= {"rollout/claims/mean": 0.9, "rollout/lenient_frac": 0.25, "val/claims/mean": 0.8}
    figure = panels(curves_figure(rows, ""))
    training = figure["training: success and reward"]
    assert legend(training) == ["reward", "success", "claims of the reward", "claimed, not solved"]
    lenient = next(line for line in training.lines if line.get_label() == "claimed, not solved")
    assert list(lenient.get_ydata()) == [0.25] * 12
    assert "claims of the reward" in legend(figure["held out: success and reward"])


def test_training_and_held_out_have_the_same_scale(rows):
    figure = panels(curves_figure(rows, ""))
    first, second = (figure[title].get_ylim() for title in TITLES[:2])
    assert first == second == (-0.02, 1.02)


def test_stop_reasons_are_stacked_to_one(rows):
    for row in rows[1:]:
        share = row["step"] / 12
        row |= {"rollout/stop/max_turns": 1 - share, "rollout/stop/done": share, "rollout/stop/timeout": 0.0}
    axes = panels(curves_figure(rows, ""))["how episodes end"]
    assert legend(axes) == ["done", "max_turns"]
    top = axes.collections[-1].get_paths()[0].vertices[:, 1]
    assert top.max() == pytest.approx(1.0)


def test_rows_without_stop_reasons_show_not_measured(rows):
    assert words(panels(curves_figure(rows, ""))["how episodes end"]) == ["not measured"]


def test_drift_is_on_a_log_axis_without_zeros(rows):
    rows[3]["analysis/logprob_drift/max"] = 0.0
    axes = panels(curves_figure(rows, ""))["drift of log-probs, engine to trainer"]
    assert axes.get_yscale() == "log"
    assert len(axes.lines[0].get_xdata()) == 11


def test_second_scale_shares_the_legend(rows):
    assert legend(panels(curves_figure(rows, ""))["speed"]) == ["tokens per second", "seconds per step (right)"]


@pytest.mark.parametrize("count", [0, 1, 2, 13])
def test_any_number_of_rows_makes_a_picture(rows, count, tmp_path):
    rows[-1]["rollout/stop/done"] = 1.0
    path = tmp_path / "curves.png"
    draw_curves(rows[:count], path, "[markup] $x$ title")
    assert path.stat().st_size > 20_000
    assert imread(path).shape[1] > 1500
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_an_unmeasured_panel_shows_not_measured(rows):
    figure = curves_figure([{"step": 1, "train/entropy": 0.5, "rollout/reward/mean": None}], "")
    texts = {title: words(axes) for title, axes in panels(figure).items()}
    assert texts["speed"] == ["not measured"] and texts["entropy of the policy"] == []


def test_null_and_nan_are_left_out(rows):
    rows[2]["train/entropy"], rows[3]["train/entropy"] = None, float("nan")
    axes = panels(curves_figure(rows, ""))["entropy of the policy"]
    assert len(axes.lines[0].get_xdata()) == 10


def test_matplotlib_comes_only_with_a_drawing():
    code = "import sys, mtrl.figures.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
