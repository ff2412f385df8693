"""Checks of the sources of a mixture (`environments`), each as the task of a run of its own."""

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.errors import UserError

SOURCES = ["experiment=mixture"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.epochs=2"], "trainer.epochs=2.0 works with one task only, and environments has words, sql"),
        (
            ["environments.sql.algorithm.group_size=1"],
            "environments.sql: algorithm.group_size=1 gives algorithm.advantage_method=turn_rloo nothing to compare",
        ),
        (["environments.sql.generator.max_turns=0"], "environments.sql: generator.max_turns=0 must be at least 1"),
        (
            ["environments.sql.reward.level=trajectory", "algorithm=group_based_per_turn"],
            "environments.sql: reward.level=trajectory puts the whole reward on the last turn, and",
        ),
        (
            ["environments.sql.generator.max_context_length=900", "generator.max_context_length=800"],
            "environments.sql: generator.max_context_length=900 must be at most that of the run, 800; lower it",
        ),
        (
            ["environments.sql.generator.max_context_length=40"],
            "environments.sql: generator.sampling_params.max_generate_length=64 leaves no room for a prompt",
        ),
        (
            ["environments.sql.generator.max_context_length=400", "generator.context.fold=keep_last"],
            "environments.sql: generator.max_context_length=400 cannot differ from the run's where contexts are folded",
        ),
    ],
)
def test_a_setting_of_a_source_that_does_not_work_is_one_sentence_with_its_name(words, sentence):
    with pytest.raises(UserError) as error:
        check(compose([*SOURCES, *words]))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ["rollouts.workers=2"],
        ["algorithm=gae", "environments.sql.algorithm.group_size=1"],
        ["environments.sql.weight=[[0,0],[200,1]]"],
        ["environments.sql.generator.max_context_length=400"],
        ["environments.sql.algorithm.group_size=4", "environments.words.environment.retries=0"],
    ],
)
def test_a_source_may_have_weights_limits_and_group_sizes_of_its_own(words):
    assert check(compose([*SOURCES, *words])) == []
