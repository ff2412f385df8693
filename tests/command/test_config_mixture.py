"""Checks of the sources of a mixture (`environments`), each as the task of a run of its own."""

import pytest

from mtrl.command.checks import check, ready
from mtrl.command.compose import compose, merge
from mtrl.command.hints import mixture_hints
from mtrl.config.mixture import is_replaced, setters
from mtrl.config.overrides import normalise
from mtrl.errors import UserError
from mtrl.evaluation.settings import Words, configuration

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
        [
            "algorithm=gdpo",
            *(f"environments.{name}.reward.components.turn_penalty=0.1" for name in ("words", "sql")),
        ],
        [
            *("reward.level=trajectory", "algorithm=group_based_per_turn"),
            *(f"environments.{name}.reward.level=turn" for name in ("words", "sql")),
        ],
    ],
)
def test_a_source_may_have_weights_limits_and_group_sizes_of_its_own(words):
    assert check(compose([*SOURCES, *words])) == []


TURNS = ["environments.words.generator.max_turns=3", "environments.sql.generator.max_turns=4"]
BOTH = "has no effect with environments, since words and sql replace it; set environments.NAME."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*TURNS, "generator.max_turns=8"], [f"generator.max_turns=8 {BOTH}generator.max_turns"]),
        ([*TURNS[:1], "generator.max_turns=8"], []),
        (TURNS, []),
        (["environment.name=sop"], [f"environment.name=sop {BOTH}environment.name"]),
        (["environment.config.operations=3"], [f"environment.config.operations=3 {BOTH}environment.config.operations"]),
        (["environment.config={operations: 3}"], [f"environment.config={{operations: 3}} {BOTH}environment.config"]),
        (["environment.retries=2"], []),
        (
            ["environment=sop"],
            [
                "environment=sop chooses the task of no episode, since words and sql name their own; set "
                "environments.NAME.environment.name"
            ],
        ),
        (
            [f"environments.{name}.generator.max_context_length=400" for name in ("words", "sql")]
            + ["generator.max_context_length=500"],
            [],  # the engine has room for it
        ),
        (["algorithm.group_size=4", "environments={}"], []),
    ],
)
def test_an_override_that_every_source_replaces_causes_a_warning(words, said):
    overrides = normalise([*SOURCES, *words])
    assert mixture_hints(merge(overrides), overrides) == said


def test_training_and_the_evaluator_warn_about_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = normalise([*SOURCES, "environment.config.operations=3"])
    said = f"environment.config.operations=3 {BOTH}environment.config.operations"
    assert said in ready(merge(overrides), overrides)
    assert said in configuration(Words.of([*SOURCES, "environment.config.operations=3"]))[1]


def test_an_open_section_of_a_source_is_merged_with_that_of_the_run():
    merged = {"words": {"environment": {"config": {"operations": 2}}}}
    assert not is_replaced(merged, "environment.config") and not is_replaced(merged, "environment.config.calculator")
    assert is_replaced(merged, "environment.config.operations") and not is_replaced({}, "algorithm.group_size")
    assert setters({**merged, "sql": {"environment": {"target": "a.B"}}}, "environment.name") == ["sql"]
