"""A real server behind its API: as a baseline of `mtrl evaluate`, as a judge, and as a teacher."""

import asyncio
import json
import random

import pytest
import torch
from engine_model import PARITY, load_model, worst
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from mtrl.command.compose import compose
from mtrl.config.endpoint_schema import BudgetConfig, EndpointConfig, PriceConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import Address
from mtrl.engines.endpoints.engine import EndpointEngine, EndpointRefusedError
from mtrl.engines.endpoints.prompt_logprobs import PromptScorer
from mtrl.engines.endpoints.wire import ChatPrompt
from mtrl.environments.factory import load_task
from mtrl.errors import RunEndedError, UserError
from mtrl.rewards.judge import judge, judge_metrics, record_spending
from mtrl.trainer.update.distillation import ServedTeacher
from mtrl.types import FinishReason, Sample, read_trajectories
from tests.evaluation.conftest import TASK

pytestmark = [pytest.mark.slow, pytest.mark.rare]

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]
KEY = "MTRL_TEST_ENGINE_KEY"


@pytest.fixture(scope="module")
def policy():
    """Folder of the policy that `evaluation.model=base` is."""
    from mtrl.trainer.setup.parts import start_of

    config = OmegaConf.to_object(compose(TASK))
    return start_of(config, load_task(config), lambda step, loss: None)


@pytest.fixture(scope="module")
def server(serving, policy):
    """A vLLM server that parses tool calls."""
    return serving("vllm", policy, context=1024, args={"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})


@pytest.fixture(autouse=True)
def _known(server, monkeypatch):
    monkeypatch.setenv(KEY, server.place.token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def ask(server, policy):
    """Function `ask(messages, tools, model=…, **sampling)` that returns one turn, and the engine that sampled it."""

    def once(messages=PROMPT, tools=(), model=policy, **sampling):
        engine = EndpointEngine(Address(str(model), f"{server.url}/v1"), EndpointConfig(KEY, timeout=60.0))

        async def run():
            try:
                given = SamplingParams(**{"max_generate_length": 12, "temperature": 0.0, **sampling})
                return await engine.generate("t", ChatPrompt(list(messages), list(tools)), given)
            finally:
                await engine.close()

        return asyncio.run(asyncio.wait_for(run(), 120)), engine

    return once


def test_a_baseline_answers_like_the_same_weights_in_process(server, policy, tmp_path, capsys):
    from mtrl.evaluation.command import main

    out = tmp_path / "out"
    words = [
        *TASK, f"evaluation.model={policy}@{server.url}/v1", "evaluation.compare=[base]", f"evaluation.output={out}",
        f"evaluation.endpoint.api_key_env={KEY}", "evaluation.rows=8", "evaluation.sampled_rows=4",
        "evaluation.endpoint.price.input=1", "evaluation.endpoint.price.output=2",
    ]  # fmt: skip
    assert main([*words, "evaluation.endpoint.budget.requests=5"]) == 1
    assert "evaluation.endpoint.budget.requests=5 is too small for another request" in capsys.readouterr().out
    assert main([*words, "evaluation.endpoint.budget.usd=1"]) == 0
    report = json.loads((out / "report.json").read_text())
    there, here = (model["label"] for model in report["models"])
    sampled_turns = [list(read_trajectories(out / "trajectories" / f"{label}_greedy.jsonl")) for label in (there, here)]
    assert len(sampled_turns[0]) == 8
    for one, other in zip(*sampled_turns, strict=True):
        assert [turn.text for turn in one.turns] == [turn.text for turn in other.turns]
        assert (one.score, one.rewards, one.stop_reason) == (other.score, other.rewards, other.stop_reason)
    usage = report["models"][0]["usage"]
    sampled = list(read_trajectories(out / "trajectories" / f"{there}_sampled.jsonl"))
    turns = [turn for trajectory in [*sampled_turns[0], *sampled] for turn in trajectory.turns]
    assert usage["requests"] >= len(turns) and usage["unconfirmed_requests"] == 0
    assert usage["prompt_tokens"] >= sum(turn.metrics["prompt_tokens"] for turn in turns) > 0
    assert usage["cached_tokens"] > 0, "later turns find the conversation there"
    assert usage["cost"] == pytest.approx((usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6)
    assert server.place.token not in capsys.readouterr().out


def test_the_stop_string_stays_in_the_text(ask):
    answer, _ = ask(stop=("#",))
    assert answer.content.endswith("#") and answer.content.count("#") == 1
    assert answer.finish == FinishReason.STOP


def test_truncated_turns_and_full_contexts_are_charged(ask):
    answer, engine = ask(max_generate_length=2)
    assert answer.finish == FinishReason.LENGTH and answer.usage["completion_tokens"] == 2
    roles = ("user", "assistant", "user")
    answer, engine = ask([{"role": role, "content": "x " * 3000} for role in roles])
    assert answer.is_full and engine.refused is None


def test_tool_calls_are_parsed(ask):
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    answer, _ = ask(tools=[{"type": "function", "function": tool}])
    assert answer.usage["completion_tokens"] > 0


def test_errors_are_reported(ask, monkeypatch):
    with pytest.raises(EndpointRefusedError, match="nope.* does not exist.*check the name of the model"):
        ask(model="nope")
    monkeypatch.setenv(KEY, "another")
    with pytest.raises(EndpointRefusedError, match=f"evaluation.endpoint.api_key_env={KEY}.*check the key in it"):
        ask()


def test_a_judge_charges_every_attempt(server, policy, tmp_path):
    """The tiny policy cannot judge: it never repeats the nonce, so the score is 0, and every attempt is charged."""
    given = {
        "url": f"{server.url}/v1", "model": str(policy), "rubric": "Be kind.", "api_key_env": KEY, "attempts": 2,
        "backoff": 0.01, "options": {"max_tokens": 8, "temperature": 0}, "price": {"input": 1, "output": 1},
        "budget": {"usd": 1},
    }  # fmt: skip
    with record_spending(tmp_path):
        conversation = [*PROMPT, {"role": "assistant", "content": "5"}]
        score, metrics = asyncio.run(asyncio.wait_for(judge(conversation, {"id": "0"}, **given), 120))
        metrics_so_far = judge_metrics()
        endless = [*PROMPT, {"role": "assistant", "content": "5 " * 2000}]
        assert asyncio.run(judge(endless, {"id": "0"}, **given)) == (0.0, {"judge/calls": 1.0, "judge/invalid": 1.0})
    assert (score, metrics) == (0.0, {"judge/calls": 2.0, "judge/invalid": 1.0})
    assert metrics_so_far["reward/judge/requests"] == 2 and metrics_so_far["reward/judge/cost"] > 0
    assert (tmp_path / "judge.json").exists()


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_teacher_gives_the_scores_of_the_same_weights_in_process(server, policy, top_k):
    """Both are in float32. Equal probabilities may be in another order, so the log-probs of each id are compared."""
    model, tokenizer = load_model(policy), AutoTokenizer.from_pretrained(policy)
    budget = Budget("distillation.teacher.endpoint", PriceConfig(), BudgetConfig())
    endpoint = EndpointConfig(KEY, timeout=60.0)
    teacher = ServedTeacher(PromptScorer.at(f"{server.url}/v1", str(policy), endpoint, budget, top_k))
    teacher.check(tokenizer)
    rng, samples = random.Random(0), []
    for length in (12, 150):
        ids, mask = [rng.randrange(len(tokenizer)) for _ in range(length)], [i > 3 for i in range(length)]
        samples.append(Sample(ids, mask, [0.0] * length, [0.0] * length, [0] * length, [0] * length))
    for sample, found in zip(samples, teacher.scores(samples), strict=True):
        ids = torch.tensor([sample.token_ids])
        with torch.no_grad():
            whole = model(input_ids=ids).logits[0, 3:-1].log_softmax(-1)
        expected = whole.gather(1, ids[0, 4:, None])[:, 0].tolist()
        assert worst(found.logprobs.tolist(), expected) < PARITY
        theirs, top = torch.from_numpy(found.top.ids), torch.from_numpy(found.top.logprobs)
        assert theirs.shape == (len(expected), top_k)
        assert worst(top.flatten().tolist(), whole.gather(1, theirs).flatten().tolist()) < PARITY
        assert worst(top.flatten().tolist(), whole.topk(top_k).values.flatten().tolist()) < PARITY
    assert budget.metrics()["prompt_tokens"] > 162


def test_a_teacher_with_too_few_log_probs_or_another_tokenizer_is_refused(server, policy, tiny_tokenizer):
    budget = Budget("distillation.teacher.endpoint", PriceConfig(), BudgetConfig())
    teacher = PromptScorer.at(f"{server.url}/v1", str(policy), EndpointConfig(KEY, timeout=60.0), budget, 50)
    with pytest.raises(RunEndedError, match=r"max allowed: 20.*; start it with --max-logprobs 50 or more, or lower "):
        asyncio.run(teacher.score_all([[1, 2, 3]]))
    teacher.top_k = 5
    with pytest.raises(UserError, match=r"has another tokenizer than the policy \(token \d+ is "):
        asyncio.run(teacher.check(tiny_tokenizer))
