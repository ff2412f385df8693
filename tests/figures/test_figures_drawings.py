"""Content of the figures: lines, labels and texts, without pixels."""

import pytest

from mtrl.figures.axis import Axis
from mtrl.figures.index import FIGURES, draw
from mtrl.figures.style import save
from mtrl.types import StopReason
from tests.figures.made import legend_of, lines_of, panels_of, row, training_rows, trajectory, turn

SPANS = [
    {"step": 1, "name": "generate", "lane": "generator", "start": 0.0, "end": 3.0},
    {"step": 1, "name": "update", "lane": "trainer", "start": 3.0, "end": 10.0},
    {"step": 2, "name": "generate", "lane": "generator", "start": 10.0, "end": 13.0},
    {"step": 2, "name": "update", "lane": "trainer", "start": 13.0, "end": 20.0},
]
ROLLOUTS = [
    trajectory([turn(reward=0.2, components={"format": 0.2}, advantages=[-1.0], metrics={"tool/add/calls": 1.0})], 0.0),
    trajectory(
        [
            turn(reward=0.0, components={"format": 0.0}, advantages=[1.0], metrics={"tool/add/calls": 3.0}),
            turn(reward=1.0, components={"format": 0.0, "correct": 1.0}, advantages=[3.0, 5.0], tokens=6),
        ]
    ),
    trajectory([turn(reward=1.0, components={"correct": 1.0})], 0.0, StopReason.MAX_TURNS),
]
WHOLE = {"trajectories": {"train_step_000001": ROLLOUTS, "train_step_000004": ROLLOUTS[1:]}, "spans": SPANS}


def words_of(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_whole_run_shows_something(study, name):
    drawing = draw(name, study(WHOLE))
    assert drawing.caption.endswith(".")
    drawn = [axes for axes in drawing.figure.axes if "not measured" not in words_of(axes)]
    assert drawn and all(axes.get_xlabel() for axes in drawn)


@pytest.mark.parametrize("rows", [[{"step": 0}], [row(1, rollout__reward__mean=None)]], ids=["empty", "null"])
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_without_data_shows_not_measured(study, name, rows):
    figure = draw(name, study({"rows": rows})).figure
    assert figure.axes and all("not measured" in words_of(axes) for axes in figure.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_of_one_row_can_be_drawn_and_saved(study, name, tmp_path):
    one = [training_rows(1)[1]]
    drawing = draw(name, study({"rows": one, "trajectories": {"train_step_000001": ROLLOUTS[:1]}, "spans": SPANS[:1]}))
    save(drawing.figure, tmp_path / f"{name}.svg", drawing.caption)
    assert (tmp_path / f"{name}.svg").stat().st_size > 5000


def test_learning_draws_a_line_for_each_group_and_a_band_for_its_seeds(study):
    rloo = {"algorithm.advantage_method": "rloo"}
    made = study({}, {"seed": 1, "rows": training_rows(lift=0.2)}, {"settings": rloo, "rows": training_rows(2)})
    drawing = draw("learning", made)
    reward = panels_of(drawing.figure)["training: reward"]
    grpo = lines_of(reward)["algorithm=grpo (2 seeds)"]
    assert grpo[0] == [1, 2, 3, 4] and grpo[1] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert lines_of(reward)["algorithm=rloo"][0] == [1, 2]
    (fill,) = reward.collections
    points = {(x, round(y, 6)) for x, y in fill.get_paths()[0].vertices}
    assert {(1, 0.1), (1, 0.3), (4, 0.4), (4, 0.6)} <= points
    assert legend_of(drawing.figure) == ["algorithm=grpo (2 seeds)", "algorithm=rloo"]
    assert "n = 1 to 2" in drawing.caption and "lowest to highest seed" in drawing.caption


def test_a_repeated_seed_is_not_called_two_seeds(study):
    assert legend_of(draw("learning", study({}, {})).figure) == ["made_up (2 runs)"]


def test_held_out_success_of_one_run_has_its_interval(study):
    drawing = draw("learning", study({}))
    (bars,) = panels_of(drawing.figure)["held out: success, greedy"].containers
    assert [segment.tolist() for segment in bars.lines[2][0].get_segments()] == [
        [[step, pytest.approx(0.1)], [step, pytest.approx(0.4)]] for step in (0, 4)
    ]
    assert "95 % interval" in drawing.caption


def test_several_seeds_have_a_band_and_no_interval(study):
    drawing = draw("learning", study({}, {"seed": 1}))
    assert not panels_of(drawing.figure)["held out: success, greedy"].containers
    assert "95 %" not in drawing.caption


def test_steps_that_only_some_seeds_have_are_dotted(study):
    reward = panels_of(draw("learning", study({}, {"seed": 1, "rows": training_rows(2)})).figure)["training: reward"]
    styles = [(line.get_linestyle(), list(line.get_xdata())) for line in reward.lines if line.get_alpha() is None]
    assert styles == [("-", [1, 2]), (":", [2, 3, 4])]


def test_curves_use_the_chosen_axis(study):
    made = study({}, axis=Axis.TRAJECTORIES)
    axes = panels_of(draw("learning", made).figure)["training: reward"]
    assert axes.get_xlabel() == "trajectories for training"
    assert lines_of(axes)["made_up"][0] == [40, 80, 120, 160]


def test_agreement_shows_claims_and_success(study):
    rows = [row(s, rollout__reward__mean=0.5, rollout__claims__mean=s / 4, rollout__success__mean=0.25) for s in (1, 2)]
    (axes,) = draw("agreement", study({"rows": rows})).figure.axes
    found = lines_of(axes)
    assert found["claims: solved by the reward"] == ([1, 2], [0.25, 0.5])
    assert found["success: solved"] == ([1, 2], [0.25, 0.25])
    (gap,) = axes.collections
    assert gap.get_label() == "claimed, not solved" and gap.get_paths()[0].vertices[:, 1].max() == 0.5


def test_claims_of_an_old_run_are_those_of_its_stored_episodes(study):
    (axes,) = draw("agreement", study(WHOLE)).figure.axes
    assert lines_of(axes)["claims: solved by the reward"] == ([1, 4], [pytest.approx(2 / 3), 1.0])


LIVE = {"rows": [{"step": 0}], "trajectories": {"train_step_000001": ROLLOUTS}, "spans": SPANS}
"""A run that has stored the trajectories of step 1, and not yet its row of metrics."""


@pytest.mark.parametrize("axis", [Axis.STEPS, Axis.HOURS])
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_live_run_can_be_drawn(study, name, axis):
    assert draw(name, study(LIVE, axis=axis)).figure.axes


def test_agreement_leaves_out_stored_episodes_of_steps_without_a_row(study):
    late = {"trajectories": {"train_step_000004": ROLLOUTS[1:], "train_step_000005": ROLLOUTS}}
    (axes,) = draw("agreement", study(late, LIVE | {"seed": 1})).figure.axes
    assert lines_of(axes)["claims: solved by the reward"] == ([1, 4], [pytest.approx(2 / 3), 1.0])


@pytest.mark.parametrize(("axis", "places"), [(Axis.STEPS, [3, 4, 5]), (Axis.HOURS, [6 / 3600, 8 / 3600])])
def test_lengths_of_a_step_without_a_row_are_drawn_on_the_axis_of_steps_only(study, axis, places):
    stored = {"trajectories": {f"train_step_00000{step}": ROLLOUTS for step in (3, 4, 5)}}
    turns, *_ = draw("lengths", study(stored, axis=axis)).figure.axes
    assert lines_of(turns)["median"][0] == pytest.approx(places)


def test_reward_against_score_shows_the_share_of_each_corner(study):
    (axes,) = draw("reward_vs_score", study({"trajectories": {"train_step_000001": ROLLOUTS}})).figure.axes
    assert sorted(words_of(axes)) == ["both 33.3%", "lenient 33.3%", "neither 33.3%", "strict 0.0%"]
    offsets = [tuple(map(tuple, dots.get_offsets())) for dots in axes.collections if len(dots.get_offsets())]
    assert offsets == [((0.0, 0.2), (1.0, 1.0)), ((0.0, 1.0),)]


def test_stop_reasons_are_stacked_in_their_order(study):
    (axes,) = draw("stops", study({}, {"seed": 1})).figure.axes
    assert [area.get_label() for area in axes.collections] == ["done", "max_turns"]
    done, late = (area.get_paths()[0].vertices[:, 1] for area in axes.collections)
    assert set(done) == {0.0, 0.75} and set(late) == {0.75, 1.0}


def test_lengths_show_the_limit_and_the_mean_of_every_step(study):
    turns, tokens, context = draw("lengths", study(WHOLE)).figure.axes
    assert lines_of(turns)["mean of every step"] == ([1, 2, 3, 4], [2.0] * 4)
    assert lines_of(turns)["limit"][1] == [3, 3]
    assert lines_of(turns)["median"] == ([1, 4], [1.0, 1.5])
    assert lines_of(tokens)["median"] == ([1, 4], [2.0, 2.0])
    assert "limit" not in lines_of(tokens), "far above everything"
    assert lines_of(context)["median"] == ([1, 4], [5.0, 9.5])


def test_components_include_the_whole_reward(study):
    (axes,) = draw("components", study({})).figure.axes
    assert lines_of(axes)["correct"][1] == pytest.approx([0.1, 0.2, 0.3, 0.4]) == lines_of(axes)["whole reward"][1]


def test_budgets_mark_their_recommended_limits(study):
    axes = panels_of(draw("budgets", study({})).figure)["training: out of turns"]
    assert [line.get_ydata()[0] for line in axes.lines if line.get_label() == "_limit 0.1"] == [0.1]


def test_turn_rewards_by_place(study):
    (axes,) = draw("turn_rewards", study({"trajectories": {"train_step_000001": ROLLOUTS}})).figure.axes
    found = lines_of(axes)
    assert found["whole reward"] == ([1, 2], [pytest.approx(0.4), 1.0])
    assert found["format"][1] == [pytest.approx(0.2 / 3), 0.0] and found["correct"][1] == [pytest.approx(1 / 3), 1.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1\nn=3", "2\nn=1"]


def test_advantages_by_place(study):
    (axes,) = draw("advantages", study({"trajectories": {"train_step_000001": ROLLOUTS}})).figure.axes
    assert lines_of(axes)["mean"] == ([1, 2], [0.0, 4.0])


def test_actions_are_a_table_of_counted_calls(study):
    (axes,) = draw("actions", study({"trajectories": {"train_step_000001": ROLLOUTS}})).figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["add"]
    assert words_of(axes) == ["2.00"]


def test_actions_of_several_groups_have_the_same_rows(study):
    calm = [trajectory([turn(metrics={"searches": 1.0, "malformed": 0.0})])]
    wild = [trajectory([turn(metrics={"malformed": 4.0}), turn(metrics={"malformed": 1.0})])]
    figure = draw(
        "actions",
        study(
            {"trajectories": {"train_step_000001": calm}},
            {"trajectories": {"train_step_000001": wild}, "settings": {"algorithm.group_size": 4}},
        ),
    ).figure
    first, second = figure.axes
    names = [[tick.get_text() for tick in axes.get_yticklabels()] for axes in figure.axes]
    assert names == [["malformed", "searches"]] * 2
    assert words_of(first) == ["·", "1.00"] and words_of(second) == ["4.00", "1.00"]
    assert first.get_ylim() == second.get_ylim() == (1.5, -0.5)
    shades = [axes.images[0].get_array().tolist() for axes in figure.axes]
    assert shades == [[[0.0], [0.5]], [[1.0, 0.5], [0.0, 0.0]]]


def test_timeline_shows_the_lanes_and_their_shares(study):
    drawing = draw("timeline", study({"spans": SPANS}))
    gantt, generator, trainer = drawing.figure.axes
    assert [tick.get_text() for tick in gantt.get_yticklabels()] == ["generator", "trainer"]
    assert [area.get_label() for area in generator.collections] == ["generate", "idle"]
    assert [area.get_label() for area in trainer.collections] == ["update", "idle"]
    assert "20 s: generator idle 70%, generate 30%; trainer update 70%, idle 30%; both at once 0%" in drawing.caption


def test_overlapping_spans_have_rows_of_their_lane_and_a_share_in_the_title(study):
    overlapping = [
        {"step": 1, "name": "generate", "lane": "generator", "start": 0.0, "end": 4.0},
        {"step": 2, "name": "generate", "lane": "generator", "start": 3.0, "end": 7.0},
        {"step": 1, "name": "wait", "lane": "trainer", "start": 0.0, "end": 4.0},
        {"step": 1, "name": "update", "lane": "trainer", "start": 4.0, "end": 7.0},
        {"step": 2, "name": "update", "lane": "trainer", "start": 7.0, "end": 10.0},
    ]
    gantt, *_ = draw("timeline", study({"spans": overlapping})).figure.axes
    boxes = [(bars.get_label(), path.get_extents()) for bars in gantt.collections for path in bars.get_paths()]
    first, second, *later = [(box.x0, box.x1, box.y0, box.y1) for _, box in boxes]
    assert (first[:2], second[:2]) == ((0, 4), (3, 7)) and first[3] <= second[2]  # one below the other
    assert all(box[2] == later[0][2] and box[3] == later[0][3] for box in later)  # the trainer's: one row
    named = [label for label, _ in boxes if label and not label.startswith("_")]
    assert named == ["generate", "update", "wait"]
    assert any("30% of the time side by side" in text.get_text() for text in gantt.texts)


def test_the_caption_of_the_timeline_has_the_speeds_of_the_median_step(study):
    rows = [
        row(step, perf__update_tokens_per_second=1000.0 * step, perf__mfu=step / 10, time__step=1.0)
        for step in (1, 2, 3)
    ]
    caption = draw("timeline", study({"spans": SPANS, "rows": rows})).caption
    assert caption.endswith("In the median step: 2,000 tokens/s trained, MFU of the update 20.0%.")


def test_a_group_without_a_timeline_is_named(study):
    drawing = draw("timeline", study({"spans": SPANS}, {"settings": {"algorithm.group_size": 4}}))
    assert len(drawing.figure.axes) == 3
    assert drawing.caption.endswith("Not measured: group_size=4.")


def test_many_groups_have_a_panel_each(study):
    made = study(*({"settings": {"algorithm.group_size": size}} for size in (2, 4, 8)))
    figure = draw("stops", made).figure
    assert list(panels_of(figure)) == ["group_size=2", "group_size=4", "group_size=8"]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_a_name_with_a_dollar_is_not_a_formula(study, tmp_path):
    rows = [row(1, **{"rollout__components__$\\frac{$": 1.0, "rollout__reward__mean": 1.0})]
    drawing = draw("components", study({"rows": rows}))
    save(drawing.figure, tmp_path / "x.png", drawing.caption)
    assert "$\\frac{$" in legend_of(drawing.figure)


def test_odd_names_of_components_are_in_the_legends(study):
    """Matplotlib leaves out names that begin with `_`, and has no glyph for a control character."""
    rows = [row(1, **{"rollout__components___hidden": 1.0, "rollout__components__\x1b[2J": 1.0})]
    made = study(
        {"rows": rows, "trajectories": {"train_step_000001": [trajectory([turn(components={"_a": 1.0, "\x1b": 1.0})])]}}
    )
    assert legend_of(draw("components", made).figure) == ["\\x1b[2J", " _hidden"]
    assert legend_of(draw("turn_rewards", made).figure) == ["\\x1b", " _a", "whole reward"]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_input_gives_the_same_bytes(study, tmp_path, kind):
    made = study(WHOLE)
    for name in ("first", "second"):
        drawing = draw("lengths", made)
        save(drawing.figure, tmp_path / f"{name}.{kind}", drawing.caption)
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("first", "second"))
    assert first == second
    assert not any(word in first for word in (b"CreationDate", b"dc:date", b"Software")), "of when, or by what"


def test_drawing_leaves_no_global_state(study):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw("learning", study({}))
    assert dict(matplotlib.rcParams) == before
