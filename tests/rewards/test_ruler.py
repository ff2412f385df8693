"""Rewards that compare the trajectories of a group: functions of a user, and the judge, against a local HTTP server."""

import json

import pytest

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig
from mtrl.config.keys import words
from mtrl.config.schema import RewardConfig
from mtrl.engines.endpoints.budget import BudgetSpentError
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.judge import judge_metrics
from mtrl.rewards.ruler import common_prefix
from mtrl.types import FinishReason, Group, Trajectory, Turn
from tests.rewards.test_judge import nonce_of, server, status  # noqa: F401

THIS = __name__
ROW = {"id": "7", "prompt": [], "ground_truth": {"answer": "42"}}
PROMPT = {"role": "user", "content": "Q?"}


def a_group(*conversations, reward=0.0):
    """Return a group with one trajectory for each list of answers."""
    trajectories = []
    for index, answers in enumerate(conversations):
        turns = []
        for n, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer}
            observation = [PROMPT] if n == 0 else [{"role": "user", "content": "more"}]
            turns.append(Turn([1], [2], [-1.0], [(0, 1)], FinishReason.STOP, answer, message, observation, reward))
        trajectories.append(Trajectory("7", "g", index, turns))
    return Group("g", ROW, trajectories)


def by_length(group):
    """1 for the longest last answer, else 0."""
    sizes = [len(trajectory.turns[-1].text) for trajectory in group.trajectories]
    return [float(size == max(sizes)) for size in sizes]


async def each_turn(group, *, scale=1.0):
    rewards = [[scale * n for n in range(len(t.turns))] for t in group.trajectories]
    return rewards, [{"rank": float(n)} for n in range(len(rewards))]


class Rank:
    def __init__(self, best=1.0):
        self.best = best

    def __call__(self, group):
        return [self.best / (1 + n) for n in range(len(group.trajectories))]


def returns(group, *, value):
    return value


def fails(group):
    raise KeyError("x")


def composed(group, name, level="turn", **parameters):
    components = {"environment": 1.0, "mine": {"target": f"{THIS}.{name}", **parameters}}
    composer = RewardComposer(RewardConfig(level=level, components=components))
    composer.apply(group)
    return composer


# -- functions of a user ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["turn", "trajectory"])
def test_a_function_gives_one_reward_per_trajectory(level):
    group = a_group(["a", "bb"], ["ccc"], reward=0.5)
    assert composed(group, "by_length", level=level, weight=0.5).compares
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert group.trajectories[1].turns[-1].components == {"environment": 0.5, "mine": 1.0}
    composed(group, "by_length", level=level, weight=2.0)  # a second application starts from the environment's rewards
    assert [t.reward for t in group.trajectories] == [1.0, 2.5]


def test_rewards_per_turn_with_metrics_and_parameters():
    group = a_group(["a", "b", "c"], ["d"])
    composed(group, "each_turn", scale=2)
    assert [t.rewards for t in group.trajectories] == [[0.0, 2.0, 4.0], [0.0]]
    assert [t.metrics for t in group.trajectories] == [{"rank": 0.0}, {"rank": 1.0}]


def test_a_class_is_called_with_each_group():
    group = a_group(["a"], ["b"])
    composed(group, "Rank", best=4.0)
    assert [t.reward for t in group.trajectories] == [4.0, 2.0]


def test_trajectories_without_turns_are_left_out():
    group = a_group(["a"], [], ["b"])
    composed(group, "Rank")
    assert [t.rewards for t in group.trajectories] == [[1.0], [], [0.5]]
    composed(a_group([], []), "fails")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "reward.components.mine gave 1 rewards for the 2 trajectories of group g; return one for each"),
        (0.5, "gave 0.5 for group g; return a list with one reward per trajectory"),
        ([[1.0, 2.0], 1.0], r"gave 2 rewards for 1 turns \(trajectory 0 of group g\)"),
        ([float("nan"), 1.0], "a reward must be a finite number"),
        (([1.0, 2.0], [{"a": 1.0}]), "gave 1 dicts of metrics for the 2 trajectories"),
        (([1.0, 2.0], [{"a": "x"}, {}]), "returned metrics"),
    ],
)
def test_a_wrong_result_is_refused_in_one_sentence(value, message):
    with pytest.raises(UserError, match=message):
        composed(a_group(["a"], ["b"]), "returns", value=value)


def test_an_error_names_the_component():
    with pytest.raises(UserError, match=r"^reward.components.mine failed: KeyError in test_ruler.py, line \d+"):
        composed(a_group(["a"]), "fails")


@pytest.mark.parametrize(("name", "parameters"), [("by_length", {"size": 1}), ("Rank", {"worst": 1}), ("returns", {})])
def test_wrong_parameters_are_refused_before_the_first_episode(name, parameters):
    with pytest.raises(UserError, match="does not fit its function"):
        RewardComposer(RewardConfig(components={"mine": {"target": f"{THIS}.{name}", **parameters}}))


# -- the judge --------------------------------------------------------------------------------------------------------


def seen(body):
    """Return the data that the judge sees."""
    return json.loads(body["messages"][1]["content"].split("\n")[1])


def scored(*scores, **more):
    """Return a reply with these scores of the trajectories 1, 2 and so on."""
    entries = [{"id": str(n), "reason": "so", "score": score} for n, score in enumerate(scores, 1)]
    return lambda body: (200, {"nonce": nonce_of(body), "scores": entries, **more})


@pytest.fixture
def component(server):  # noqa: F811
    return {"target": "mtrl.rewards.ruler.ruler", "url": server.url, "model": "m", "backoff": 0.001}


def judged(group, component, **more):
    composer = RewardComposer(RewardConfig(components={"ruler": {**component, **more}}))
    composer.apply(group)
    return [t.reward for t in group.trajectories]


def test_one_request_for_a_group_with_the_common_beginning_once(server, component):  # noqa: F811
    server.replies = [scored(0.25, 1, 0)]
    group = a_group(["a", "b"], ["a", "c"], ["a"], ["a", "c"])
    assert judged(group, component, show=["ground_truth"]) == [0.25, 1.0, 0.0, 1.0]
    (body,) = server.seen
    data = seen(body)
    assert data["context"] == [PROMPT] and data["ground_truth"] == {"answer": "42"}
    assert [len(entry["messages"]) for entry in data["trajectories"]] == [3, 3, 1]  # equal conversations once
    assert body["temperature"] == 0 and "more efficiently" in body["messages"][0]["content"]
    assert [t.metrics for t in group.trajectories] == [
        {"ruler/calls": float(n == 0), "ruler/invalid": 0.0} for n in range(4)
    ]
    assert judge_metrics()["reward/ruler/requests"] == 1.0


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (scored(0.5), "the judge gave 1 scores for 2 trajectories"),
        (scored(0.5, 0.5, 0.5), "the judge gave 3 scores for 2 trajectories"),
        (scored(0.5, 1.5), "the score of trajectory 2 is not a number from 0 to 1"),
        (scored(0.5, True), "the score of trajectory 2 is not a number from 0 to 1"),
        (scored(0.5, 0.5, note="x"), "the verdict must have the key scores with a list"),
        (lambda body: (200, {"nonce": "n", "scores": []}), "does not hold the nonce"),
        (
            lambda body: (200, {"nonce": nonce_of(body), "scores": [{"id": 1, "score": 1}, {"id": 1, "score": 0}]}),
            "the ids of the scores are not 1 to 2, each once",
        ),
        (lambda body: (200, {"nonce": nonce_of(body), "scores": [1, 0]}), "must have the keys id, score and reason"),
    ],
)
def test_an_invalid_verdict_is_retried_and_then_all_scores_are_0(server, component, caplog, reply, problem):  # noqa: F811
    server.replies = [reply]
    group = a_group(["a"], ["b"])
    assert judged(group, component, attempts=2) == [0.0, 0.0]
    assert len(server.seen) == 2 and problem in caplog.text
    assert [t.metrics["ruler/invalid"] for t in group.trajectories] == [1.0, 1.0]
    server.replies = [reply, scored(0.5, 1)]
    assert judged(a_group(["a"], ["b"]), component) == [0.5, 1.0]


def test_a_judge_that_is_down_ends_the_run_in_one_sentence(server, component):  # noqa: F811
    server.replies = [status(500)]
    with pytest.raises(UserError, match="the judge at .* failed 2 times, .*raise reward.components.ruler.attempts"):
        judged(a_group(["a"], ["b"]), component, attempts=2)


def test_the_budget_counts_groups(server, component):  # noqa: F811
    server.replies = [scored(0.5, 1)]
    judged(a_group(["a"], ["b"]), component, budget=1)
    with pytest.raises(BudgetSpentError, match="reward.components.ruler.budget=1 is too small"):
        judged(a_group(["c"], ["d"]), component, budget=1)


def test_verdicts_are_cached(server, component, tmp_path):  # noqa: F811
    server.replies = [scored(0.5, 1)]
    for _ in range(2):
        assert judged(a_group(["a"], ["b"]), component, cache=str(tmp_path)) == [0.5, 1.0]
    assert len(server.seen) == 1
    (file,) = tmp_path.rglob("*.json")
    file.write_text('{"scores": [{"id": "1", "score": 1}]}')  # a file with too few scores is requested again
    assert judged(a_group(["a"], ["b"]), component, cache=str(tmp_path)) == [0.5, 1.0]
    assert len(server.seen) == 2


def test_wrong_settings_are_refused_before_the_first_episode(component):
    wrong_ones = (({"attempts": 0}, "attempts=0 must be a whole number"), ({"rubrik": "x"}, "does not fit"))
    for wrong, message in wrong_ones:
        with pytest.raises(UserError, match=message):
            RewardComposer(RewardConfig(components={"ruler": {**component, **wrong}}))


@pytest.mark.parametrize("method", sorted({*words("algorithm.advantage_method")} - {"gae", "turn_gae"}))
def test_scores_become_advantages_with_every_method(server, component, method):  # noqa: F811
    server.replies = [scored(0.0, 1.0)]
    group = a_group(["a", "b"], ["c"])
    judged(group, component)
    algorithm = AlgorithmConfig(advantage_method=method, passk=PassKConfig(k=1))
    ((worse, better),) = turn_advantages([group], algorithm, {"ruler": 1.0})
    assert better[-1] > worse[-1]


def test_the_common_beginning_leaves_a_message_of_each():
    assert common_prefix([[1, 2], [1, 2]]) == 1
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 1
    assert common_prefix([[1], [2, 3]]) == 0
    assert common_prefix([[]]) == 0


# -- whole runs -------------------------------------------------------------------------------------------------------


def a_run(path, component, *words):
    from mtrl.command.compose import compose
    from mtrl.trainer.run import train
    from tests.evaluation.conftest import TASK

    cfg = compose(
        [
            *TASK, f"run_dir={path}", "evaluation.before_train=false", "evaluation.every_steps=0", "evaluation.rows=2",
            "evaluation.sampled_rows=0", "evaluation.samples_per_row=1", "evaluation.pass_k_values=[1]",
            "trainer.prompts_per_step=2", "algorithm.group_size=2", "preflight.at_start=none", "diagnosis.live=none",
            "tracker.plots=false", "model.warm_start.check_every=2", "trainer.save_trajectories_every=1", *words,
        ]
    )  # fmt: skip
    cfg.reward.components = {"environment": 1.0, "ruler": component}
    return train(cfg)


def by_letters(body):
    """Score each trajectory by a hash of its text, so that the scores do not depend on its place."""
    entries = [
        {"id": entry["id"], "score": sum(map(ord, json.dumps(entry["messages"]))) % 101 / 100}
        for entry in seen(body)["trajectories"]
    ]
    return 200, {"nonce": nonce_of(body), "scores": entries}


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_a_run_is_judged_by_groups_resumed_and_rescored(server, component, tmp_path, capsys, lag):  # noqa: F811
    """Rescoring with the run's own settings changes nothing, because it judges whole groups too."""
    from mtrl.rescore.__main__ import main as rescore

    server.replies = [by_letters]
    run = tmp_path / "run"
    words = [f"async_config.max_steps_off_policy={lag}", "generator.local.process=false"]
    a_run(run, component, *words, "trainer.max_steps=1")
    assert a_run(run, component, *words, "trainer.max_steps=2", "resume=latest")["steps"] == 2
    asked = [len(seen(body)["trajectories"]) for body in server.seen]
    assert max(asked) == 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward/ruler/requests"] >= 4 and "rollout/components/ruler" in str(rows[-1])
    capsys.readouterr()
    assert rescore([str(run), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["trajectories"]
    assert lines and all(line["reward_after"] == line["reward_before"] for line in lines)
