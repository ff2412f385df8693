"""Settings of distillation: errors name key, value and fix, and settings without effect cause a warning."""

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.errors import UserError

PATH, URL = "distillation.teacher.path=folder", "distillation.teacher.url=http://localhost:8000/v1"
SERVED = [URL, "distillation.teacher.model=m"]
ALONE = "distillation.reward_weight=0"

REFUSED = [
    (["distillation.weight=-1"], "distillation.weight=-1.0 must be at least 0"),
    (["distillation.top_k=-1"], "distillation.top_k=-1 must be at least 0"),
    (
        [PATH, URL],
        "distillation.teacher.path=folder and distillation.teacher.url=http://localhost:8000/v1 both name a ",
    ),
    ([URL], "needs the name of a model; write distillation.teacher.model=NAME"),
    (["distillation.teacher.url='http://['", "distillation.teacher.model=m"], "url=http://[ is no address"),
    (
        ["distillation.teacher.url=localhost", "distillation.teacher.model=m"],
        "is no address; write http://HOST:PORT/v1",
    ),
    ([*SERVED, "generator.sampling_params.temperature=0.7"], "generator.sampling_params.temperature=0.7 does not fit "),
    ([*SERVED, "distillation.teacher.endpoint.budget.usd=1"], "distillation.teacher.endpoint.budget.usd=1.0 needs "),
    ([PATH, "algorithm.dynamic_sampling_rounds=2"], "algorithm.dynamic_sampling_rounds=2 replaces groups without an "),
    (
        [PATH, ALONE, "algorithm=gae"],
        "distillation.reward_weight=0 leaves the critic of algorithm.advantage_method=gae",
    ),
    ([PATH, ALONE, "algorithm.kl_reward_coef=0.1"], "set algorithm.kl_loss_coef instead"),
    ([PATH, "algorithm.group_size=1"], "algorithm.group_size=1 gives algorithm.advantage_method=turn_rloo nothing to"),
    ([ALONE, "algorithm.group_size=1"], "algorithm.group_size=1 gives algorithm.advantage_method=turn_rloo nothing to"),
]
WARNED = [
    ([], []),
    ([PATH, ALONE, "algorithm.group_size=1", "distillation.weight=0.5", "distillation.top_k=8"], []),
    ([*SERVED, "distillation.teacher.endpoint.timeout=9"], []),
    (
        ["distillation.top_k=8"],
        ["distillation.top_k=8 has no effect with no teacher; name one by distillation.teacher.path or url"],
    ),
    (
        [ALONE],
        ["distillation.reward_weight=0.0 has no effect with no teacher; name one by distillation.teacher.path or url"],
    ),
    (
        [PATH, "distillation.weight=0"],
        ["distillation.teacher.path=folder has no effect with distillation.weight=0"],
    ),
    (
        [PATH, "distillation.teacher.model=m"],
        ["distillation.teacher.model=m has no effect with distillation.teacher.url=null"],
    ),
]


def words(overrides):
    return " ".join(overrides) or "default"


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[words(overrides) for overrides, _ in REFUSED])
def test_what_cannot_work_is_refused(overrides, said):
    with pytest.raises(UserError) as refused:
        check(compose(overrides))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("overrides", "said"), WARNED, ids=[words(overrides) for overrides, _ in WARNED])
def test_what_has_no_effect_is_told(overrides, said):
    assert check(compose(overrides)) == said
