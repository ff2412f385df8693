"""Groups of runs and their labels."""

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.figures.groups import differing, group_runs, labels, repeated_seeds
from mtrl.record.run import Run
from tests.figures.made import MadeUpRun


def runs(make_run, *settings):
    made = [
        make_run(f"run{number}", seed=some.pop("seed", number), settings=some) for number, some in enumerate(settings)
    ]
    return [Run(folder) for folder in made]


def names(groups):
    return [(group.label, group.seeds) for group in groups]


def test_seeds_of_one_configuration_are_one_group_with_its_name(make_run):
    assert names(group_runs(runs(make_run, {}, {}, {}))) == [("made_up", 3)]


def test_groups_are_labelled_by_the_settings_that_differ(make_run):
    found = group_runs(runs(make_run, {}, {"algorithm.advantage_method": "rloo"}, {}))
    assert names(found) == [("algorithm=grpo", 2), ("algorithm=rloo", 1)]


def test_settings_without_effect_on_learning_do_not_separate_runs(make_run):
    same = {"tracker.project": "x", "trainer.save_trajectories_every": 5, "parent": "outputs/another/run"}
    assert names(group_runs(runs(make_run, {}, same, {"diagnosis.window": 9}))) == [("made_up", 3)]
    assert len(group_runs(runs(lambda name, **k: make_run(f"b{name}", **k), {}, {"trainer.max_steps": 9}))) == 2


def test_a_missing_key_is_its_default(make_run):
    """Runs of an older version, whose config.yaml has no evaluation.success_threshold."""
    found = group_runs(runs(make_run, {}, {"evaluation.success_threshold": 1.0}, {"evaluation.success_threshold": 0.9}))
    assert names(found) == [("success_threshold=1", 2), ("success_threshold=0.9", 1)]


def test_equal_numbers_are_equal_settings(make_run):
    assert names(group_runs(runs(make_run, {"a.b": 1}, {"a.b": 1.0}, {"a.b": "1"})))[0][1] == 2


def test_labels_have_as_few_settings_as_possible(make_run):
    """Other differences are in the table of index.html."""
    both = {"algorithm.group_size": 4, "trainer.prompts_per_step": 32, "generator.max_turns": 9}
    found = group_runs(runs(make_run, {}, both))
    assert [label for label, _ in names(found)] == ["group_size=8", "group_size=4"]


def test_a_label_begins_with_the_experiment():
    found = labels([{"lr": 1, "name": "a"}, {"lr": 2, "name": "b"}, {"lr": 3, "name": "b"}])
    assert found == ["a, lr=1", "b, lr=2", "b, lr=3"]


def test_two_keys_with_the_same_last_word_are_written_out():
    found = labels([{"a.lr": 1, "b.lr": 1}, {"a.lr": 2, "b.lr": 1}, {"a.lr": 1, "b.lr": 2}])
    assert found == ["a.lr=1, b.lr=1", "a.lr=2, b.lr=1", "a.lr=1, b.lr=2"]


def test_long_values_that_are_cut_to_the_same_text_have_different_labels():
    """Figures hold the data of a group by its label; one of two groups with the same label was not drawn."""
    paths = [f"/data/{'shared/' * 9}{name}{'/rows' * 9}" for name in ("first", "other")]
    label, other = labels([{"data.path": path} for path in paths])
    assert label.startswith("path=/data/shared/") and other == f"{label} (2)"


def test_a_name_cannot_act_on_a_terminal():
    assert labels([{"name": "a\x1b[31m"}]) == ["a\\x1b[31m"]


def test_a_repeated_seed_is_reported(make_run):
    (group,) = group_runs(runs(make_run, {"seed": 1}, {"seed": 2}, {"seed": 1}))
    assert [(first.path.name, second.path.name) for first, second in repeated_seeds(group)] == [("run0", "run2")]


VALUES = st.fixed_dictionaries({key: st.sampled_from([0, 1, "x", None]) for key in ("a.k", "b.k", "name", "c")})


@hypothesis.settings(deadline=None, max_examples=60)
@given(settings=st.lists(VALUES, min_size=1, max_size=12))
def test_every_run_is_in_one_group_and_labels_are_unique(settings):
    found = group_runs([MadeUpRun(str(n), some) for n, some in enumerate(settings)])
    assert sorted(int(run.path.name) for group in found for run in group) == list(range(len(settings)))
    assert len({group.label for group in found}) == len(found)
    for group in found:
        assert all(run.settings == group.runs[0].settings for run in group)


@pytest.mark.parametrize(("identities", "expected"), [([{"a": 1}, {"a": 1}], []), ([{"a": 1}, {}], ["a"])])
def test_differing(identities, expected):
    assert differing(identities) == expected
