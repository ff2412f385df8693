"""Environments with one fault each: the checklist fails in the line of that fault, and in no other line."""

import copy
import functools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.preflight import context
from mtrl.preflight.__main__ import check
from mtrl.preflight.responses import FUZZ
from mtrl.preflight.result import Status

BROKEN = Path(__file__).parent / "broken"
EXPECTED = {
    "any_answer_counts": {"format_only": "responses that ignore the task solve 2 of 2 rows: '<final_output>987654321"},
    "capped_length_pays": {
        "format_only": "the direct answer earns 1.00, the best exploit found 0.90: 'because because beca…",
        "growth": "a wrong answer: 0.00, 0.90 after 1,000 characters of filler, 0.90 after 20,000 characters",
        "local_optimum": "earns 0.90 (a wrong answer after 1,000 characters of filler, repeated); solving earns 1.00",
    },
    "constant_reward": {
        "spread": "100 episodes of the demonstrator: reward 0.00 to 0.00, 0 successes: all rewards are 0.00"
    },
    "crashing": {"robust": "KeyError in crashing.py, line "},
    "crashing_on_answers": {"robust": "a full stop in the answer: ValueError in crashing_on_answers.py, line "},
    "echo_pays": {"echo": "the direct answer earns 1.00, the best exploit found 0.90: the question back"},
    "form_beats_success": {"local_optimum": "earns 0.50 (a wrong answer, repeated); solving earns 1.00, and the demo"},
    "format_pays": {
        "format_only": "the direct answer earns 1.00, the best exploit found 0.80",
        "local_optimum": "earns 0.80",
    },
    "hanging": {"robust": "took longer than environment.step_timeout"},
    "hard_rows_pay": {
        "format_only": "the direct answer earns 1.50, the best exploit found 0.90",
        "local_optimum": "earns 0.90 (the failures of the demonstrator)",
    },
    "hash_order": {"hermetic": "observation after turn 1"},
    "leaky_class": {"leaks": "changed meanwhile: tests.preflight.broken.leaky_class.Leaky.seen", "concurrency": "look"},
    "length_pays": {"growth": "longer responses get more reward"},
    "lenient_digits": {"agreement": "a digit after the number: 2 of 2"},
    "lenient_place": {"agreement": "text before: 2 of 2", "stuffing": "whole replies joined by"},
    "lenient_tag": {"agreement": "<final_response> for <final_output>: 2 of 2"},
    "not_finite": {"range": "returned the reward nan", "spread": "18 successes"},
    "overlapping_splits": {"splits": "5 share prompt and ground truth (again-40;"},
    "random_tool": {"hermetic": "ms' / '"},
    "spam_pays": {
        "growth": "reward 1.00 in 5 turns, 4.00 in 20",
        "local_optimum": "earns 1.00 (move 1 of its players, repeated); solving earns 1.20",
        "tool_spam": "to the end",
        "stalling": "the direct answer earns 1.20, the best exploit found 1.80: 3× '<look>",
    },
    "stalling_pays": {"stalling": "the direct answer earns 1.00, the best exploit found 1.08: 4× '', then right"},
    "stuffing_pays": {"stuffing": "answers joined by"},
    "thread_race": {"concurrency": "on 8 threads"},
    "too_few_turns": {
        "turns": "gold needs 8 to 8 turns (95 %: 8); generator.max_turns=5",
        "gold": "stopped: max_turns",
    },
    "unreachable": {"gold": "the reward is 0", "spread": "all rewards are 0.00"},
    "wall_clock": {"hermetic": "as of 20"},
    "wrong_example": {"prompt": "gold answers in <final_output>, the prompt shows <look>, <final_response>"},
    "wrong_fields": {"prompt": "the example lacks gate and has weather in excess"},
}
"""Environment -> all lines that fail, with a part of their evidence."""
WARNED = {"turn_penalty": {"growth": "reward -0.15 in 5 turns, -0.90 in 20"}}
"""Environment -> the lines that only warn."""
WARNED_BESIDES = {
    "form_beats_success": {"format_only": "the best exploit found 0.50"},
    "spam_pays": {"range": "outside of [-1, 1]"},
    "stalling_pays": {"local_optimum": "earns 0.08 (silence)"},
}
"""Environment -> lines that warn, in addition to those that fail."""


@functools.cache
def composed():
    choice = [
        "preflight.rows=2",
        "experiment=null",
        "environment.name=x",
        "environment.target=tests.preflight.broken.sound.FAMILY",
    ]
    return OmegaConf.to_object(compose([*choice, "preflight.model=false"]))


def results_of(name, **settings):
    """Return the checklist of one environment, without a policy."""
    config = copy.deepcopy(composed())
    config.environment.target = f"tests.preflight.broken.{name}.FAMILY"
    for field, value in settings.items():
        part = config.environment if field == "step_timeout" else config.preflight
        setattr(part, field, value)
    return {result.name: result for result in check(config)}


def failed_lines(results):
    return {name for name, result in results.items() if result.status == Status.FAIL}


def test_every_broken_environment_is_tried():
    assert {path.stem for path in BROKEN.glob("*.py")} == {"sound", *EXPECTED, *WARNED}


def test_the_sound_environment_passes():
    results = results_of("sound")
    expected_skips = ("model=false", "environment.prompt is short")
    checked = [r for r in results.values() if not any(reason in r.evidence for reason in expected_skips)]
    assert {r.status for r in checked} == {Status.PASS}, results


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"hanging"}))
def test_the_right_lines_fail(name, monkeypatch):
    """The sound environment and those that fail at `robust` get all unexpected responses, the others every sixth."""
    if "robust" not in EXPECTED[name]:
        monkeypatch.setattr(context, "FUZZ", FUZZ[::6])
    results = results_of(name, **({} if "hermetic" in EXPECTED[name] else {"processes": 0}))
    assert failed_lines(results) == EXPECTED[name].keys(), results
    for line, words in EXPECTED[name].items():
        assert words in results[line].evidence
        assert results[line].fix
    for line, words in WARNED_BESIDES.get(name, {}).items():
        assert results[line].status == Status.WARN and words in results[line].evidence


@pytest.mark.parametrize("name", WARNED)
def test_the_right_lines_warn(name, monkeypatch):
    monkeypatch.setattr(context, "FUZZ", FUZZ[::6])
    results = results_of(name, processes=0)
    assert {line for line, result in results.items() if result.status == Status.WARN} == WARNED[name].keys(), results
    for line, words in WARNED[name].items():
        assert words in results[line].evidence
    assert results["growth"].fix == "a policy may answer before it knows enough; cap the cost"
    assert not failed_lines(results)


@pytest.mark.slow
def test_an_environment_that_hangs_ends():
    results = results_of("hanging", step_timeout=0.3, seconds=0.2)
    assert failed_lines(results) == {"robust"}, results
    assert EXPECTED["hanging"]["robust"] in results["robust"].evidence
    assert any("episodes were left out for lack of time" in result.evidence for result in results.values())
