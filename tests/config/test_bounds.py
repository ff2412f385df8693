"""Every number of the schema is checked against the bound that its field states."""

import math

import pytest
from omegaconf import OmegaConf

from mtrl.config.field import Bound
from mtrl.config.keys import all_keys, plain, takes
from mtrl.config.messages import check_values
from mtrl.config.schema import Config, EvalSamplingConfig
from mtrl.errors import UserError

BOUNDED = {path: key.bound for path, key in all_keys().items() if key.bound}
FREE = (
    *("algorithm.turn_advantage_coef", "algorithm.entropy_coef", "generator.sampling_params.top_k"),
    *("generator.eval_sampling_params.top_k", "evaluation.success_threshold", "evaluation.claim_threshold"),
)
"""Numbers without a bound."""


def refusal(path: str, value: float) -> str | None:
    """Return the error for a configuration with this value, None if it is accepted."""
    cfg = OmegaConf.create()
    OmegaConf.update(cfg, path, value)
    try:
        check_values(plain(cfg))
    except UserError as error:
        return str(error)
    return None


def outside(bound: Bound) -> list[tuple[int, str]]:
    """Return the nearest whole number beyond each end of the bound, and the words for that end."""
    beyond = (
        *((low - 1, f"at least {low}") for low in (bound.at_least,) if low is not None),
        *((low, f"above {low}") for low in (bound.above,) if low is not None),
        *((high + 1, f"at most {high}") for high in (bound.at_most,) if high is not None),
        *((high, f"below {high}") for high in (bound.below,) if high is not None),
    )
    return [*beyond]


@pytest.mark.parametrize("path", BOUNDED)
def test_a_value_beyond_the_bound_of_a_field_is_refused(path):
    bound = BOUNDED[path]
    assert outside(bound)
    for value, words in outside(bound):
        why = f" ({bound.why})" if bound.why else ""
        assert refusal(path, value) == f"{path}={value} must be {words}{why}"
        assert not takes(path, str(value))


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, end) for path, bound in BOUNDED.items() for end in (bound.at_least, bound.at_most) if end is not None],
)
def test_the_least_and_the_most_are_accepted(path, value):
    assert refusal(path, value) is None
    assert takes(path, str(value))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.prompts_per_step", 0, "at least 1"),
        ("diagnosis.window", 4, "at least 5"),
        ("model.warm_start.max_steps", 0, "at least 1"),
        ("model.warm_start.ema_decay", 1, "below 1"),
        ("model.warm_start.muon_lr", 0, "above 0"),
        ("model.tiny.vocabulary", 256, "at least 262 (256 bytes and 6 special tokens are always in it)"),
        ("preflight.seconds", 0, "above 0"),
        ("preflight.rollouts", 0, "at least 1 (preflight.model=false skips the checks that need the policy)"),
        ("generator.sampling_params.top_p", 1.5, "at most 1"),
        ("environment.max_failed_share", 1.5, "at most 1"),
        ("evaluation.confidence", 95, "below 1 (0.95 is the usual level)"),
        ("generator.eval_sampling_params.temperature", -1, "at least 0 (0 is greedy)"),
        ("generator.eval_sampling_params.max_generate_length", 0, "at least 1"),
        *((f"{section}.optimizer.lr", 0, "above 0") for section in ("trainer", "algorithm.critic")),
        *((f"{section}.optimizer.min_lr_ratio", 2, "at most 1") for section in ("trainer", "algorithm.critic")),
        *((f"generator.{engine}.restarts", -1, "at least 0") for engine in ("vllm", "sglang")),
        *((f"generator.{engine}.sync_timeout", 0, "above 0") for engine in ("vllm", "sglang")),
    ],
)
def test_bounds_of_every_kind_and_of_sections_that_are_used_twice(path, value, said):
    assert refusal(path, value) == f"{path}={value} must be {said}"


def test_greedy_is_for_evaluations_only():
    assert refusal("generator.eval_sampling_params.temperature", 0) is None
    assert "teach nothing" in refusal("generator.sampling_params.temperature", 0)


UNLIMITED = (
    *(f"{section}.optimizer.max_grad_norm" for section in ("trainer", "algorithm.critic")),
    *("algorithm.clip_high_threshold", "algorithm.is_cap", "algorithm.correction_high"),
    *("algorithm.dppo.delta_low", "algorithm.dppo.delta_high", "generator.agent.max_requests_per_second"),
)
"""Numbers that may be infinite, which leaves out the limit that they set."""


def test_only_limits_that_can_be_left_out_may_be_infinite():
    """An infinite rate or time limit was accepted, and the run trained weights that are not numbers or ended with a
    traceback."""
    numbers = [path for path, key in all_keys().items() if key.type is float]
    said = {path: refusal(path, math.inf) for path in numbers}
    upper = {path for path in numbers if (bound := BOUNDED.get(path)) and (bound.at_most or bound.below) is not None}
    assert {path for path, words in said.items() if words is None} == {*UNLIMITED}
    refused = [path for path in numbers if path not in (*UNLIMITED, *upper)]
    assert [said[path] for path in refused] == [f"{path}=inf must be a finite number" for path in refused]
    assert not takes("trainer.optimizer.lr", "inf") and takes("trainer.optimizer.max_grad_norm", "inf")


def test_null_is_within_every_bound():
    nullable = [path for path in BOUNDED if all_keys()[path].optional]
    assert len(nullable) > 10
    assert [refusal(path, None) for path in nullable] == [None] * len(nullable)


def test_every_number_has_a_bound_or_is_free():
    numbers = {path for path, key in all_keys().items() if key.type in (int, float)}
    assert BOUNDED.keys() <= numbers
    assert numbers - BOUNDED.keys() == set(FREE)


def test_every_default_lies_within_its_bound():
    cfg = OmegaConf.structured(Config(run_dir="run"))  # Hydra registers the time in the default only as it composes
    cfg.generator.eval_sampling_params = EvalSamplingConfig()
    check_values(plain(cfg))
