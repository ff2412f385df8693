"""The check of full prompts: it passes for every shipped task, and fails for prompts with a wrong name or example."""

from dataclasses import replace
from functools import cache

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.datasets import Splits
from mtrl.environments.factory import load_task
from mtrl.preflight.checklist import CHECKS
from mtrl.preflight.context import CheckContext
from mtrl.preflight.result import Status

FULL = ["environment.prompt=full", "data.synthetic_train_rows=6", "data.synthetic_test_rows=4"]


@cache
def composed(*overrides):
    return compose(overrides)


def result_of(*overrides, changes=(), **family):
    """The check's result for a task, whose prompts are changed by replacements of text."""
    config = OmegaConf.to_object(composed(*FULL, *overrides))
    task = load_task(config)
    rows = task.splits.train + task.splits.test
    for row in rows:
        for message in row["prompt"] if changes else ():
            for old, new in changes:
                message["content"] = message["content"].replace(old, new)
    assert not changes or any(
        new in message["content"] for row in rows for message in row["prompt"] for _, new in changes
    )
    splits = Splits(task.splits.train, task.splits.test)
    known = replace(task.family, **family)
    context = CheckContext(config, known, splits, task.make_environment, max_rows=4, seconds=60.0)
    return CHECKS["worked_example"](context)


@pytest.mark.parametrize(
    ("words", "examples"),
    [
        (["experiment=gsm8k"], "1 worked example is"),
        (["experiment=gsm8k_single_turn"], "1 worked example is"),
        (["experiment=text_to_sql"], "1 worked example is"),
        (["experiment=games"], "2 worked examples are"),
        (["experiment=search"], "1 worked example is"),
        (["experiment=triviaqa"], "1 worked example is"),
        (["experiment=mini_swe"], "1 worked example is"),
        (["experiment=service"], "1 worked example is"),
        (["experiment=sop", "environment.config.domain=all", "generator.max_turns=8"], "3 worked examples are"),
        (["experiment=agent_word_problems", "generator.agent.target=null"], "1 worked example is"),
    ],
    ids=lambda value: value[0].partition("=")[2] if isinstance(value, list) else None,
)
def test_the_prompts_of_every_shipped_task_pass(words, examples):
    result = result_of(*words)
    assert result.status == Status.PASS, result.details
    assert result.evidence.startswith(examples)


@pytest.mark.parametrize(
    ("task", "changes", "problem"),
    [
        ("gsm8k", [("####", "Answer:")], "responses use ####, which the instructions do not name"),
        ("gsm8k", [("\n#### 31", "\n\\boxed{31}")], "its example gets reward 0 and score 0"),
        ("gsm8k", [("such as #### 72", "such as \\boxed{72}")], "the instructions name \\boxed, which nothing uses"),
        ("gsm8k", [("\n#### 31", "\n#### 32")], "its example gets reward 0 and score 0"),
        ("gsm8k", [("<calc>", "<compute>"), ("</calc>", "</compute>")], "responses use <calc>"),
        ("gsm8k", [("one <calc>expression</calc>", "an expression")], "responses use <calc>"),
        ("text_to_sql", [("<solution>query", "<answer>query")], "the instructions name <answer>, which nothing uses"),
        ("text_to_sql", [("<solution>select", "<answer>select")], "the environment rejects turn 2 of its example"),
        ("games", [("<move>east</move>", "<go>east</go>")], "the environment rejects turn 1 of its example"),
        ("search", [("<answer>Fyris", "<answer>Danube")], "its example gets reward 0 and score 0"),
        ("search", [("<information>Doc", "<result>Doc")], "its example shows the reply '<result>Doc 1"),
        (
            "triviaqa",
            [('"name": "wiki_search", "desc', '"name": "find", "desc')],
            "the instructions name find, which is",
        ),
        ("triviaqa", [('"name": "wiki_search", "args": {"q', '"name": "find", "args": {"q')], "rejects turn 1"),
        ("triviaqa", [('"args": {"query": "Rome', '"args": {"text": "Rome')], "rejects turn 1 of its example"),
        ("triviaqa", [('{"name": "wiki_search", "desc', '{"desc')], "the instructions do not describe the tool wiki_s"),
        (
            "mini_swe",
            [("`echo COMPLETE_TASK_AND", "`echo SUBMIT_TASK_AND")],
            "the instructions name SUBMIT_TASK_AND_SUB",
        ),
        ("mini_swe", [("```bash\nyour", "```sh\nyour")], "responses use ```bash, which the instructions do not name"),
        (
            "sop",
            [("Call getOrder,", "Call fetchOrder,")],
            "the instructions name fetchOrder, which is no tool, argument",
        ),
        ("sop", [("Assistant calls getOrder", "Assistant calls fetchOrder")], "the environment rejects turn 1"),
        ("sop", [('calls getStock: {"sku"', 'calls getStock: {"article"')], "the environment rejects turn 3"),
        ("service", [("up with get_order", "up with fetch_order")], "the instructions name fetch_order, which is no"),
        ("service", [("The reference is R", "The number is Q")], "its example gets reward 0 and score 0"),
        ("sop", [("<final_output>", "<final_answer>")], "responses use <final_output>, which the instructions do not"),
    ],
)
def test_a_prompt_with_a_wrong_name_fails(task, changes, problem):
    settings = ["environment.config.domain=order_fulfilment", "generator.max_turns=8"] if task == "sop" else []
    result = result_of(f"experiment={task}", *settings, changes=changes)
    assert result.status == Status.FAIL
    assert any(problem in detail for detail in result.details), result.details
    assert problem in result.evidence or len(result.details) > 2


def test_an_example_with_more_turns_than_the_run_allows_fails():
    result = result_of("experiment=search", "generator.max_turns=2")
    assert result.status == Status.FAIL
    assert "its example has 3 turns, and the episode ends after 2" in result.evidence


def test_tasks_without_an_example_are_skipped():
    result = result_of("experiment=gsm8k", "environment.prompt=short")
    assert (result.status, "environment.prompt is short" in result.evidence) == (Status.SKIP, True)
    result = result_of("experiment=gsm8k", worked_example=None)
    assert (result.status, "gsm8k has no `worked_example`" in result.evidence) == (Status.SKIP, True)
    result = result_of("experiment=gsm8k", changes=[("Here is an example", "An example")])
    assert (result.status, "have no worked example" in result.evidence) == (Status.SKIP, True)
