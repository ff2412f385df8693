"""Costs of requests: prices, upper bounds, budgets that are never exceeded, and the file after a killed process."""

import asyncio
import json
import random
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.config.endpoint_schema import BudgetConfig, EndpointConfig, PriceConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.endpoints import chat_client
from mtrl.engines.endpoints.budget import (
    Budget,
    BudgetSpentError,
    Spending,
    TokenUsage,
    check_spending,
    format_spending,
    format_usd,
    maximum_usage,
)
from mtrl.engines.endpoints.chat_client import Address
from mtrl.engines.endpoints.engine import EndpointEngine, EndpointError
from mtrl.engines.endpoints.wire import ChatPrompt
from mtrl.errors import RunEndedError, UserError
from tests.engines.chat_server import ChatServer, Reply, always, chat_reply, refusal

PRICE = PriceConfig(input=2.0, cached=0.5, output=10.0)
COUNTS = st.integers(0, 10**6)
USAGES = st.builds(TokenUsage, COUNTS, COUNTS, COUNTS)
PRICES = st.builds(PriceConfig, st.floats(0, 100), st.none() | st.floats(0, 100), st.floats(0, 100))


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_request():
    assert TokenUsage(1_000_000, 400_000, 200_000).cost(PRICE) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.2 * 10)
    assert TokenUsage(1_000_000, 400_000, 0).cost(PriceConfig(2.0, None, 10.0)) == pytest.approx(2.0)
    assert TokenUsage(10, 10**9, 0).cost(PRICE) == pytest.approx(10 * 0.5 / 1e6), "no more cached than there was"
    assert TokenUsage(5, 5, 5).cost(PriceConfig()) is None and TokenUsage(5, 5, 5).cost(PriceConfig(0, 0, 0)) == 0


@given(PRICES, USAGES, USAGES)
def test_costs_add_up(price, one, other):
    if one.cached_tokens <= one.prompt_tokens and other.cached_tokens <= other.prompt_tokens:
        assert (one + other).cost(price) == pytest.approx(one.cost(price) + other.cost(price), rel=1e-9, abs=1e-12)


def test_the_cost_is_unknown_without_a_price():
    spending = Spending(3, 1, TokenUsage(10, 4, 5), 1, TokenUsage(300, 0, 100))
    metrics = spending.metrics(PriceConfig())
    assert "cost" not in metrics and "USD" not in format_spending(metrics)
    assert format_spending(spending.metrics(PRICE)) == (
        "10 prompt tokens (4 cached), 5 completion tokens, 3 requests (1 repeated), 6.4e-05 USD, and 1 of the requests "
        "without a count of tokens, at most 0.0016 USD more"
    )
    assert [format_usd(cost) for cost in (0, 0.00123456, 0.5, 1, 1234.567)] == [
        "0.00 USD", "0.00123 USD", "0.5 USD", "1.00 USD", "1,234.57 USD",
    ]  # fmt: skip


@given(st.lists(st.text(max_size=200), max_size=4), st.integers(1, 4096), st.none() | st.integers(1, 4))
def test_the_upper_bound_covers_the_count_of_a_byte_tokenizer(texts, limit, n):
    messages = [{"role": "user", "content": text} for text in texts]
    maximum = maximum_usage({"messages": messages, "max_tokens": limit, **({"n": n} if n else {})})
    assert maximum.prompt_tokens >= sum(len(text.encode(errors="replace")) + 8 for text in texts)
    assert maximum.completion_tokens == limit * (n or 1)


def test_requests_without_a_limit_have_no_upper_bound():
    assert maximum_usage({"messages": []}) is None and maximum_usage({"messages": [], "max_tokens": None}) is None
    for limits in ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 5}):
        assert maximum_usage({"messages": [], **limits}).completion_tokens == 9


@pytest.mark.parametrize(
    ("price", "budget", "words"),
    [
        ((1, None, None), {}, "k.price.output is not given"),
        ((None, None, 1), {}, "k.price.input is not given"),
        ((None, 1, None), {}, "k.price.input is not given"),
        ((-1, None, 1), {}, "k.price.input=-1 must be USD per million tokens"),
        ((float("nan"), None, 1), {}, "k.price.input=nan must be"),
        ((None, None, None), {"usd": 5.0}, "k.budget.usd=5.0 needs k.price.input and k.price.output"),
        ((1, None, 1), {"usd": 0}, "k.budget.usd=0 must be more than 0"),
        ((None, None, None), {"requests": -1}, "k.budget.requests=-1 must be more than 0"),
        ((None, None, None), {"tokens": True}, "k.budget.tokens=True must be more than 0"),
    ],
)
def test_invalid_prices_and_limits_are_refused(price, budget, words):
    with pytest.raises(UserError, match=words):
        check_spending("k", PriceConfig(*price), BudgetConfig(**budget))


# -- a budget ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.floats(0, 1), st.booleans()), max_size=25),
    st.integers(0, 300),
    st.integers(0, 10**6),
)
def test_a_budget_is_never_exceeded_and_used_as_far_as_possible(concurrency, requests, tokens, seed):
    """For any concurrent requests and outcomes: the upper bound of the spending stays within the limit."""
    budget = Budget("k", PRICE, BudgetConfig(tokens=max(tokens, 1)))
    generator, refused, highest = random.Random(seed), [], 0

    async def one(prompt, completion, share, is_answered):
        nonlocal highest
        maximum = TokenUsage(prompt, 0, completion)
        try:
            async with budget.reserve("me", maximum) as reservation:
                spending = sum((each.spending for each in budget.in_flight), budget.total)
                highest = max(highest, spending.tokens)
                for _ in range(generator.randrange(4)):
                    await asyncio.sleep(0)
                if is_answered:
                    reservation.settle(TokenUsage(int(share * prompt), 0, int(share * completion)))
        except BudgetSpentError:
            refused.append(maximum.prompt_tokens + maximum.completion_tokens)

    async def all_of_them():
        slots = asyncio.Semaphore(concurrency)

        async def go(request):
            async with slots:
                await one(*request)

        await asyncio.wait_for(asyncio.gather(*map(go, requests)), 20)

    asyncio.run(all_of_them())
    assert highest <= budget.limits.tokens and budget.total.tokens <= budget.limits.tokens
    assert bool(refused) == (budget.closed is not None) and budget.total.requests + len(refused) == len(requests)
    if refused:
        assert budget.total.tokens + refused[0] > budget.limits.tokens, "the first that was refused did not fit"


def test_two_reservations_of_the_same_amount_are_distinct():
    """The later one is settled first, and then they are no longer equal."""
    budget = Budget("k", PRICE, BudgetConfig())

    async def run():
        first, second = budget.reserve("me", TokenUsage(9, 0, 9)), budget.reserve("me", TokenUsage(9, 0, 9))
        one, two = await first.__aenter__(), await second.__aenter__()
        two.settle(TokenUsage(1, 0, 1))
        await second.__aexit__(None, None, None)
        assert budget.in_flight == (one,) and budget.total == Spending(1, 0, TokenUsage(1, 0, 1))
        one.settle(TokenUsage(2, 0, 2))
        await first.__aexit__(None, None, None)

    asyncio.run(run())
    assert budget.total == Spending(2, 0, TokenUsage(3, 0, 3)) and not budget.in_flight


def test_requests_in_flight_are_waited_for_and_not_counted_as_spent():
    """Requests whose upper bounds do not fit together, and whose actual cost is small: all are answered."""
    with ChatServer(always(Reply(body=chat_reply("x", prompt=10, completion=5).body, before=0.05))) as server:
        config = EndpointConfig(timeout=5, budget=BudgetConfig(tokens=600), max_concurrent=8)
        answers, engine = ask(server.url, 4, config)
    assert [getattr(a, "content", a) for a in answers] == ["x"] * 4 and engine.budget.closed is None
    assert server.most_busy == 1


def ask(url, times, config, budget=None):
    engine = EndpointEngine(Address("m", url), config, budget)
    prompt = ChatPrompt([{"role": "user", "content": "Q"}])

    async def run():
        sampling = SamplingParams(max_generate_length=7, temperature=0.0)
        answers = await asyncio.gather(
            *(engine.generate(str(i), prompt, sampling) for i in range(times)), return_exceptions=True
        )
        await engine.close()
        return answers

    return asyncio.run(asyncio.wait_for(run(), 60)), engine


def test_no_request_is_sent_that_could_exceed_the_budget():
    config = EndpointConfig(timeout=5, max_concurrent=1, price=PRICE, budget=BudgetConfig(usd=0.002))
    with ChatServer(always(chat_reply("x", prompt=300, completion=20, cached=0))) as server:
        answers, engine = ask(server.url, 8, config)
    total = engine.budget.total
    assert total.requests == len(server.requests) == 2 and total.counted == TokenUsage(600, 0, 40)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(errors) == 6 and all(isinstance(error, BudgetSpentError | RunEndedError) for error in errors)
    assert str(errors[0]) == (
        "evaluation.endpoint.budget.usd=0.002 is too small for another request, after 600 prompt tokens (0 cached), 40 "
        "completion tokens, 2 requests (0 repeated), 0.0016 USD; raise it to continue"
    )
    assert engine.refused is errors[0]


@pytest.mark.parametrize("limit", ["usd", "tokens"])
def test_a_budget_needs_a_limit_of_tokens(limit):
    config = EndpointConfig(extra_body={"max_tokens": None}, price=PRICE, budget=BudgetConfig(**{limit: 5}))
    with pytest.raises(
        UserError, match=f"evaluation.endpoint.budget.{limit} cannot be enforced.*max_completion_tokens"
    ):
        EndpointEngine(Address("m", "http://127.0.0.1/v1"), config)
    config.extra_body["max_completion_tokens"] = 9
    EndpointEngine(Address("m", "http://127.0.0.1/v1"), config)


# -- what counts ------------------------------------------------------------------------------------------------------

FREE, MAXIMUM = TokenUsage(), "maximum"


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        (chat_reply("x", prompt=10, completion=5, cached=3), TokenUsage(10, 3, 5)),
        (refusal(500, "oops"), FREE),
        (refusal(429, "slow down"), FREE),
        (Reply(500, {"error": "late", "usage": {"prompt_tokens": 7, "completion_tokens": 2}}), TokenUsage(7, 0, 2)),
        (Reply(200, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}), TokenUsage(7, 0, 2)),
        (Reply(200, {"choices": [{"message": {"content": "no count"}}]}), MAXIMUM),
        (Reply(200, b"{half a js"), MAXIMUM),
        (Reply(504, b"gateway"), MAXIMUM),
        (Reply(body=None), MAXIMUM),
        (Reply(body={}, before=1.0), MAXIMUM),
    ],
    ids=["answer", "500", "429", "charged-500", "charged-garble", "no-count", "garble", "504", "cut", "timeout"],
)
def test_the_spending_of_one_attempt(reply, counts):
    with ChatServer(always(reply)) as server:
        _, engine = ask(server.url, 1, EndpointConfig(timeout=0.3, retries=0))
        maximum = maximum_usage(server.requests[0])
    total = engine.budget.total
    assert total.requests == 1
    if counts == MAXIMUM:
        assert (total.unconfirmed_requests, total.unconfirmed, total.counted) == (1, maximum, FREE)
    else:
        assert (total.unconfirmed_requests, total.unconfirmed, total.counted) == (0, FREE, counts)


def test_an_unreachable_server_costs_nothing():
    with ChatServer(always(chat_reply("x"))) as server:
        url = server.url
    (answer,), engine = ask(url, 1, EndpointConfig(timeout=5, retries=2))
    assert isinstance(answer, EndpointError) and engine.budget.total == Spending(3, 2)


def test_a_cancelled_request_is_unconfirmed():
    budget = Budget("k", PRICE, BudgetConfig())

    async def run(url):
        engine = EndpointEngine(Address("m", url), EndpointConfig(timeout=5), budget, "them")
        prompt, sampling = ChatPrompt([{"role": "user", "content": "Q"}]), SamplingParams(7, 0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("1", prompt, sampling), 0.1)
        await engine.close()

    with ChatServer(always(Reply(body=chat_reply("x").body, before=0.5))) as server:
        asyncio.run(run(server.url))
    assert budget.spending["them"].unconfirmed_requests == 1 and not budget.in_flight


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_spending_survives_the_process(tmp_path):
    path = tmp_path / "spending" / "spent.json"
    limits = BudgetConfig(requests=3)
    config = EndpointConfig(timeout=5, retries=0)
    with ChatServer(always(chat_reply("x"))) as server:
        ask(server.url, 2, config, Budget("k", PRICE, limits, path))
        reopened = Budget("k", PRICE, limits, path)
        assert reopened.total == Spending(2, 0, TokenUsage(22, 6, 10))
        answers, _ = ask(server.url, 2, config, reopened)
    assert [isinstance(answer, BudgetSpentError) for answer in answers] == [False, True]
    assert len(server.requests) == 3 and Budget("k", PRICE, limits, path).total.requests == 3
    assert Budget("k", PriceConfig(0, 0, 0), BudgetConfig(requests=9), path).closed is None


KILLED = """
import asyncio, os, sys
from pathlib import Path
from mtrl.config.endpoint_schema import BudgetConfig, PriceConfig
from mtrl.engines.endpoints.budget import Budget, TokenUsage

async def main():
    budget = Budget("k", PriceConfig(), BudgetConfig(), Path(sys.argv[1]))
    async with budget.reserve("a", TokenUsage(100, 0, 50)) as reservation:
        reservation.settle(TokenUsage(10, 0, 5))
    async with budget.reserve("a", TokenUsage(100, 0, 50)), budget.reserve("b", TokenUsage(200, 0, 70), True):
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_requests_in_flight_when_the_process_was_killed_count(tmp_path):
    path = tmp_path / "spent.json"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120, check=False).returncode == -9
    budget = Budget("k", PriceConfig(), BudgetConfig(), path)
    assert budget.spending["a"] == Spending(2, 0, TokenUsage(10, 0, 5), 1, TokenUsage(100, 0, 50))
    assert budget.spending["b"] == Spending(1, 1, TokenUsage(), 1, TokenUsage(200, 0, 70))
    later = Budget("k", PriceConfig(), BudgetConfig())
    later.spending["b"] = Spending(1, 0, TokenUsage(7, 0, 1))
    stored = path.read_text()
    later.store(path)
    assert later.total == budget.total + Spending(1, 0, TokenUsage(7, 0, 1)) and path.read_text() == stored
    assert later.spending["a"] == budget.spending["a"]


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"spent": {"a": 5}, "on_its_way": []}', '{"spent": {}}', "\x00"])
def test_an_unreadable_file_is_refused(tmp_path, junk):
    path = tmp_path / "spent.json"
    path.write_text(junk)
    with pytest.raises(UserError, match="spent.json, which stores the spending, cannot be read"):
        Budget("k", PRICE, BudgetConfig(), path)


def test_no_request_is_sent_that_cannot_be_recorded(tmp_path):
    budget = Budget("k", PRICE, BudgetConfig(), tmp_path / "spending" / "spent.json")
    (tmp_path / "spending").write_text("")
    with ChatServer(always(chat_reply("x"))) as server:
        answers, _ = ask(server.url, 3, EndpointConfig(timeout=5), budget)
    assert not server.requests
    assert all("which stores the spending of k, cannot be written" in str(answer) for answer in answers)


def test_many_threads_share_one_budget(tmp_path):
    budget = Budget("k", PRICE, BudgetConfig(requests=150), tmp_path / "spent.json")
    refused = []

    async def one():
        try:
            async with budget.reserve("me", TokenUsage(1, 0, 1)) as reservation:
                await asyncio.sleep(0.001)
                reservation.settle(TokenUsage(1, 0, 1))
        except BudgetSpentError:
            refused.append(1)

    async def fifty():
        await asyncio.gather(*(one() for _ in range(50)))

    threads = [threading.Thread(target=lambda: asyncio.run(fifty())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(refused) == 50 and budget.total == Spending(150, 0, TokenUsage(150, 0, 150))
    content = json.loads((tmp_path / "spent.json").read_text())
    assert content["spent"]["me"]["requests"] == 150 and content["on_its_way"] == []
