"""Spending on a judge: prices, budgets across processes, and checks of settings before the start."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.schema import RewardConfig
from mtrl.engines.endpoints.budget import BudgetSpentError
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.judge import judge, judge_metrics, judge_spending, record_spending
from tests.engines.chat_server import ChatServer, chat_reply
from tests.evaluation.conftest import TASK

ROW = {"id": "7", "prompt": [], "ground_truth": {}}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def graded(body, n):
    nonce = body["messages"][1]["content"].split("\n")[0].removeprefix("BEGIN ")
    return chat_reply(
        json.dumps({"nonce": nonce, "reason": "good", "score": 0.5}), prompt=100, completion=20, cached=40
    )


@pytest.fixture
def server():
    with ChatServer(graded) as server:
        yield server


@pytest.fixture
def settings(server):
    return {
        "url": server.url, "model": "m", "rubric": "Is it good?", "backoff": 0.001,
        "price": {"input": 1.0, "cached": 0.5, "output": 10.0}, "options": {"temperature": 0, "max_tokens": 20},
    }  # fmt: skip


COST = (60 * 1.0 + 40 * 0.5 + 20 * 10.0) / 1e6


def ask(settings, *texts):
    async def go():
        each = (judge([{"role": "assistant", "content": text}], ROW, **settings) for text in texts)
        return await asyncio.wait_for(asyncio.gather(*each), 30)

    return asyncio.run(go())


def test_the_cost_of_requests(server, settings):
    with record_spending(None):
        ask(settings, "a", "b", "c")
        spending = judge_spending()["judge"]
        assert (spending["requests"], spending["prompt_tokens"], spending["completion_tokens"]) == (3, 300, 60)
        assert spending["cost"] == pytest.approx(3 * COST)
        assert judge_metrics()["reward/judge/cost"] == spending["cost"]
    assert judge_spending() == {}


def test_without_a_price_there_is_no_cost_metric(settings):
    with record_spending(None):
        ask({**settings, "price": None}, "a")
        assert "reward/judge/cost" not in judge_metrics() and judge_metrics()["reward/judge/prompt_tokens"] == 100


def test_a_budget_in_usd_counts_the_spending_of_earlier_processes(server, settings, tmp_path):
    """The maximum cost of a request is far above its actual cost, so the last requests exceed the budget."""
    settings = {**settings, "budget": {"usd": 0.01}}
    done = 0
    for _ in range(20):
        with record_spending(tmp_path):  # as in another process
            try:
                done += len(ask(settings, *(f"{done} {n}" for n in range(2))))
            except BudgetSpentError as error:
                message = str(error)
                break
    assert "reward.components.judge.budget.usd=0.01 is too small for another request, after" in message
    account = json.loads((tmp_path / "judge.json").read_text())["spent"]["m"]
    assert account["requests"] == len(server.requests) >= 2
    assert 0.005 < len(server.requests) * COST <= 0.01
    with record_spending(tmp_path), pytest.raises(BudgetSpentError):
        ask(settings, "more")
    with record_spending(tmp_path):
        ask({**settings, "budget": {"usd": 1}}, "more")
        assert judge_spending()["judge"]["requests"] == len(server.requests) == account["requests"] + 1


def test_names_that_differ_in_a_mark_have_files_of_their_own(settings, tmp_path):
    with record_spending(tmp_path):
        ask({**settings, "name": "a b"}, "1")
        ask({**settings, "name": "a_b"}, "1", "2")
    with record_spending(tmp_path):
        for name in ("a b", "a_b", "a/b"):
            ask({**settings, "name": name}, "3")
        assert {name: own["requests"] for name, own in judge_spending().items()} == {"a b": 2, "a_b": 3, "a/b": 1}


def test_judges_share_a_budget_only_under_one_name(settings, tmp_path):
    style = {**settings, "name": "style", "budget": {"requests": 1}}
    with record_spending(tmp_path):
        ask(settings, "a", "b")
        ask(style, "a")
        with pytest.raises(UserError, match="reward.components.style.budget.requests=1 is too small"):
            ask(style, "b")
        assert {name: metrics["requests"] for name, metrics in judge_spending().items()} == {"judge": 2, "style": 1}
        ask({**settings, "rubric": "Another, with the same budget."}, "a")
        assert judge_spending()["judge"]["requests"] == 3
        with pytest.raises(UserError, match="two judges are called judge and have different budgets or prices"):
            ask({**settings, "budget": 7}, "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge.json", "style.json"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "localhost:8000"}, "judge.url=localhost:8000 is no address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env=NO_SUCH_KEY: the environment variable is not set"),
        ({"budget": {"usd": 5}, "price": None}, "judge.budget.usd=5 needs reward.components.judge.price.input"),
        ({"budget": {"dollars": 5}}, "judge.budget={'dollars': 5} is not understood; it takes usd, requests, tokens"),
        ({"budget": {"tokens": 5}, "options": {}}, "judge.budget.tokens cannot be enforced.*judge.options.max_compl"),
        ({"budget": 0}, "judge.budget=0 must be more than 0"),
        ({"price": {"input": 1}}, "judge.price.output is not given"),
        ({"price": {"input": "1", "output": 1}}, "judge.price.input=1 must be USD per million tokens"),
        ({"price": 5}, "judge.price=5 is not understood"),
        ({"attempts": 0}, "judge.attempts=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_episode(server, settings, monkeypatch, wrong, message):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    component = {"weight": 0.5, "target": "mtrl.rewards.judge.judge", **settings, **wrong}
    with pytest.raises(UserError, match=message):
        RewardComposer(RewardConfig(components={"judge": component}))
    assert not server.requests


def test_the_judge_in_the_documentation_is_valid(monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    components = OmegaConf.create(block).reward.components
    with pytest.raises(UserError, match="MY_KEY: the environment variable is not set"):
        RewardComposer(RewardConfig(components=components))
    monkeypatch.setenv("MY_KEY", "k")
    assert RewardComposer(RewardConfig(components=components)).weights == {"environment": 1.0, "judge": 0.5}


def test_a_configuration_whose_judge_lacks_its_api_key_is_refused(monkeypatch):
    from mtrl.main import prepare

    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge_of = "+reward.components.judge={target: mtrl.rewards.judge.judge, url: 'http://h/v1', model: m, rubric: r"
    with pytest.raises(UserError, match="api_key_env=NO_SUCH_KEY: the environment variable is not set"):
        prepare([judge_of + ", api_key_env: NO_SUCH_KEY}"])


def test_a_run_is_saved_when_the_budget_is_spent_and_can_be_resumed(server, settings, tmp_path):
    """The metrics include the spending before the run was resumed."""
    from mtrl.record.run_dir import RunDir
    from mtrl.trainer.checkpoint.checkpoint import Checkpoints
    from mtrl.trainer.run import train

    run = RunDir(tmp_path / "run")

    def go(requests, *words):
        cfg = compose(
            [
                *TASK, f"run_dir={run}", "evaluation.before_train=false", "evaluation.every_steps=0",
                "evaluation.rows=2", "evaluation.sampled_rows=0", "evaluation.samples_per_row=1",
                "evaluation.pass_k_values=[1]", "trainer.prompts_per_step=2", "algorithm.group_size=2",
                "trainer.max_steps=3", "preflight.at_start=none", "tracker.plots=false",
                "model.warm_start.check_every=2", *words,
            ]
        )  # fmt: skip
        component = {"weight": 0.5, "target": "mtrl.rewards.judge.judge", **settings, "budget": {"requests": requests}}
        cfg.reward.components = {"environment": 1.0, "judge": component}
        return train(cfg)

    with pytest.raises(BudgetSpentError, match="reward.components.judge.budget.requests=5 is too small"):
        go(5)
    assert len(server.requests) == 5 and Checkpoints(run.checkpoints).latest() is not None
    with pytest.raises(BudgetSpentError):
        go(5, "resume=latest")
    assert len(server.requests) == 5
    assert go(500, "resume=latest")["steps"] == 3
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    counts = [row["reward/judge/requests"] for row in rows if "reward/judge/requests" in row]
    assert counts == sorted(counts) and counts[0] <= 4 and 5 < counts[-1] <= len(server.requests)
    assert rows[-1]["reward/judge/cost"] == pytest.approx(counts[-1] * COST)
