"""What asking costs: prices, worst cases, budgets that hold at every moment, and what a killed process leaves."""

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
from mtrl.engines.endpoints.chat_client import Address
from mtrl.engines.endpoints.engine import EndpointEngine, EndpointError
from mtrl.engines.endpoints.purse import (
    BudgetSpentError,
    Purse,
    Spent,
    Usage,
    check_spending,
    described,
    dollars,
    most_of,
)
from mtrl.engines.endpoints.wire import ChatPrompt
from mtrl.errors import RunEndedError, UserError
from tests.engines.chat_server import ChatServer, Reply, always, refusal, said

PRICE = PriceConfig(input=2.0, cached=0.5, output=10.0)
COUNTS = st.integers(0, 10**6)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS)
PRICES = st.builds(PriceConfig, st.floats(0, 100), st.none() | st.floats(0, 100), st.floats(0, 100))


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_a_cost():
    assert Usage(1_000_000, 400_000, 200_000).cost(PRICE) == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 0.2 * 10)
    assert Usage(1_000_000, 400_000, 0).cost(PriceConfig(2.0, None, 10.0)) == pytest.approx(2.0)
    assert Usage(10, 10**9, 0).cost(PRICE) == pytest.approx(10 * 0.5 / 1e6), "no more cached than there was"
    assert Usage(5, 5, 5).cost(PriceConfig()) is None and Usage(5, 5, 5).cost(PriceConfig(0, 0, 0)) == 0


@given(PRICES, USAGES, USAGES)
def test_costs_add_up(price, one, other):
    if one.cached_tokens <= one.prompt_tokens and other.cached_tokens <= other.prompt_tokens:
        assert (one + other).cost(price) == pytest.approx(one.cost(price) + other.cost(price), rel=1e-9, abs=1e-12)


def test_no_price_is_no_cost():
    spent = Spent(3, 1, Usage(10, 4, 5), 1, Usage(300, 0, 100))
    assert "cost" not in spent.metrics(PriceConfig()) and "USD" not in described(spent.metrics(PriceConfig()))
    told = described(spent.metrics(PRICE))
    assert told == (
        "10 prompt tokens (4 cached), 5 completion tokens, 3 requests (1 repeated), 6.4e-05 USD, and 1 of the requests "
        "without a count of tokens, at most 0.0016 USD more"
    )
    assert [dollars(cost) for cost in (0, 0.00123456, 0.5, 1, 1234.567)] == [
        "0.00 USD", "0.00123 USD", "0.5 USD", "1.00 USD", "1,234.57 USD",
    ]  # fmt: skip


@given(st.lists(st.text(max_size=200), max_size=4), st.integers(1, 4096), st.none() | st.integers(1, 4))
def test_the_worst_case_is_no_less_than_what_a_byte_tokenizer_counts(texts, limit, n):
    messages = [{"role": "user", "content": text} for text in texts]
    most = most_of({"messages": messages, "max_tokens": limit, **({"n": n} if n else {})})
    assert most.prompt_tokens >= sum(len(text.encode(errors="replace")) + 8 for text in texts)
    assert most.completion_tokens == limit * (n or 1)


def test_requests_without_a_limit_have_no_worst_case():
    assert most_of({"messages": []}) is None and most_of({"messages": [], "max_tokens": None}) is None
    assert most_of({"messages": [], "max_tokens": 5, "max_completion_tokens": 9}).completion_tokens == 9


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
def test_what_means_nothing_is_refused(price, budget, words):
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
def test_a_budget_is_never_exceeded_and_used_as_far_as_it_is_sure(at_once, requests, tokens, seed):
    """Whatever is asked at once, and whatever becomes of it: what may have been billed stays within the budget."""
    purse = Purse("k", PRICE, BudgetConfig(tokens=max(tokens, 1)))
    clock, refused, highest = random.Random(seed), [], 0

    async def one(prompt, completion, share, is_answered):
        nonlocal highest
        most = Usage(prompt, 0, completion)
        try:
            async with purse.pay("me", most) as bill:
                open_now = sum((each.spent for each in purse._open), purse.total)
                highest = max(highest, open_now.tokens)
                for _ in range(clock.randrange(4)):
                    await asyncio.sleep(0)
                if is_answered:
                    bill.settle(Usage(int(share * prompt), 0, int(share * completion)))
        except BudgetSpentError:
            refused.append(most.prompt_tokens + most.completion_tokens)

    async def all_of_them():
        slots = asyncio.Semaphore(at_once)

        async def go(request):
            async with slots:
                await one(*request)

        await asyncio.wait_for(asyncio.gather(*map(go, requests)), 20)

    asyncio.run(all_of_them())
    assert highest <= purse.budget.tokens and purse.total.tokens <= purse.budget.tokens
    assert bool(refused) == (purse.closed is not None) and purse.total.requests + len(refused) == len(requests)
    if refused:
        assert purse.total.tokens + refused[0] > purse.budget.tokens, "the first that was refused did not fit"


def test_two_bills_of_the_same_amount_are_two():
    """The later one is settled first, and then they are no longer alike."""
    purse = Purse("k", PRICE, BudgetConfig())

    async def run():
        first, second = purse.pay("me", Usage(9, 0, 9)), purse.pay("me", Usage(9, 0, 9))
        one, two = await first.__aenter__(), await second.__aenter__()
        two.settle(Usage(1, 0, 1))
        await second.__aexit__(None, None, None)
        assert purse._open == [one] and purse.total == Spent(1, 0, Usage(1, 0, 1))
        one.settle(Usage(2, 0, 2))
        await first.__aexit__(None, None, None)

    asyncio.run(run())
    assert purse.total == Spent(2, 0, Usage(3, 0, 3)) and not purse._open


def test_what_is_on_its_way_is_waited_for_and_not_taken_for_spent():
    """Two requests whose worst cases do not fit together, and which cost little: both are answered."""
    with ChatServer(always(Reply(body=said("x", prompt=10, completion=5).body, before=0.05))) as server:
        config = EndpointConfig(timeout=5, budget=BudgetConfig(tokens=600), max_concurrent=8)
        answers, engine = ask(server.url, 4, config)
    assert [getattr(a, "content", a) for a in answers] == ["x"] * 4 and engine._client.purse.closed is None
    assert server.most_busy == 1


def ask(url, times, config, purse=None):
    engine = EndpointEngine(Address("m", url), config, purse)
    prompt = ChatPrompt([{"role": "user", "content": "Q"}])

    async def run():
        sampling = SamplingParams(max_generate_length=7, temperature=0.0)
        answers = await asyncio.gather(
            *(engine.generate(str(i), prompt, sampling) for i in range(times)), return_exceptions=True
        )
        await engine.close()
        return answers

    return asyncio.run(asyncio.wait_for(run(), 60)), engine


def test_nothing_is_sent_that_could_be_too_much():
    config = EndpointConfig(timeout=5, max_concurrent=1, price=PRICE, budget=BudgetConfig(usd=0.002))
    with ChatServer(always(said("x", prompt=300, completion=20, cached=0))) as server:
        answers, engine = ask(server.url, 8, config)
    spent = engine._client.purse.total
    assert spent.requests == len(server.requests) == 2 and spent.counted == Usage(600, 0, 40)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(errors) == 6 and all(isinstance(error, BudgetSpentError | RunEndedError) for error in errors)
    assert str(errors[0]) == (
        "evaluation.endpoint.budget.usd=0.002 does not do for another request, after 600 prompt tokens (0 cached), 40 "
        "completion tokens, 2 requests (0 repeated), 0.0016 USD; raise it to go on"
    )
    assert engine.refused is errors[0]


@pytest.mark.parametrize("limit", ["usd", "tokens"])
def test_a_budget_needs_a_limit_of_tokens(limit):
    config = EndpointConfig(extra_body={"max_tokens": None}, price=PRICE, budget=BudgetConfig(**{limit: 5}))
    with pytest.raises(UserError, match=f"evaluation.endpoint.budget.{limit} cannot be kept to.*max_completion_tokens"):
        EndpointEngine(Address("m", "http://127.0.0.1/v1"), config)
    config.extra_body["max_completion_tokens"] = 9
    EndpointEngine(Address("m", "http://127.0.0.1/v1"), config)


# -- what counts ------------------------------------------------------------------------------------------------------

FREE, WORST = Usage(), "worst"


@pytest.mark.parametrize(
    ("reply", "counts"),
    [
        (said("x", prompt=10, completion=5, cached=3), Usage(10, 3, 5)),
        (refusal(500, "oops"), FREE),
        (refusal(429, "slow down"), FREE),
        (Reply(500, {"error": "late", "usage": {"prompt_tokens": 7, "completion_tokens": 2}}), Usage(7, 0, 2)),
        (Reply(200, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}), Usage(7, 0, 2)),
        (Reply(200, {"choices": [{"message": {"content": "no count"}}]}), WORST),
        (Reply(200, b"{half a js"), WORST),
        (Reply(504, b"gateway"), WORST),
        (Reply(body=None), WORST),
        (Reply(body={}, before=1.0), WORST),
    ],
    ids=["answer", "500", "429", "billed-500", "billed-garble", "no-count", "garble", "504", "cut", "timeout"],
)
def test_what_one_attempt_counts(reply, counts):
    with ChatServer(always(reply)) as server:
        _, engine = ask(server.url, 1, EndpointConfig(timeout=0.3, retries=0))
        most = most_of(server.requests[0])
    spent = engine._client.purse.total
    assert spent.requests == 1
    if counts == WORST:
        assert (spent.unconfirmed_requests, spent.unconfirmed, spent.counted) == (1, most, FREE)
    else:
        assert (spent.unconfirmed_requests, spent.unconfirmed, spent.counted) == (0, FREE, counts)


def test_a_server_that_is_not_there_costs_nothing():
    with ChatServer(always(said("x"))) as server:
        url = server.url
    (answer,), engine = ask(url, 1, EndpointConfig(timeout=5, retries=2))
    assert isinstance(answer, EndpointError) and engine._client.purse.total == Spent(3, 2)


def test_who_gives_up_may_have_been_billed():
    purse = Purse("k", PRICE, BudgetConfig())

    async def run(url):
        engine = EndpointEngine(Address("m", url), EndpointConfig(timeout=5), purse, "them")
        prompt, sampling = ChatPrompt([{"role": "user", "content": "Q"}]), SamplingParams(7, 0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("1", prompt, sampling), 0.1)
        await engine.close()

    with ChatServer(always(Reply(body=said("x").body, before=0.5))) as server:
        asyncio.run(run(server.url))
    assert purse.spent["them"].unconfirmed_requests == 1 and not purse._open


# -- the file ---------------------------------------------------------------------------------------------------------


def test_what_was_spent_survives_the_process(tmp_path):
    path = tmp_path / "books" / "spent.json"
    budget = BudgetConfig(requests=3)
    config = EndpointConfig(timeout=5, retries=0)
    with ChatServer(always(said("x"))) as server:
        ask(server.url, 2, config, Purse("k", PRICE, budget, path))
        again = Purse("k", PRICE, budget, path)
        assert again.total == Spent(2, 0, Usage(22, 6, 10))
        answers, _ = ask(server.url, 2, config, again)
    assert [isinstance(answer, BudgetSpentError) for answer in answers] == [False, True]
    assert len(server.requests) == 3 and Purse("k", PRICE, budget, path).total.requests == 3
    assert Purse("k", PriceConfig(0, 0, 0), BudgetConfig(requests=9), path).closed is None


KILLED = """
import asyncio, os, sys
from pathlib import Path
from mtrl.config.endpoint_schema import BudgetConfig, PriceConfig
from mtrl.engines.endpoints.purse import Purse, Usage

async def main():
    purse = Purse("k", PriceConfig(), BudgetConfig(), Path(sys.argv[1]))
    async with purse.pay("a", Usage(100, 0, 50)) as bill:
        bill.settle(Usage(10, 0, 5))
    async with purse.pay("a", Usage(100, 0, 50)), purse.pay("b", Usage(200, 0, 70), True):
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_what_was_on_its_way_when_the_process_was_killed_counts(tmp_path):
    path = tmp_path / "spent.json"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=120, check=False).returncode == -9
    purse = Purse("k", PriceConfig(), BudgetConfig(), path)
    assert purse.spent["a"] == Spent(2, 0, Usage(10, 0, 5), 1, Usage(100, 0, 50))
    assert purse.spent["b"] == Spent(1, 1, Usage(), 1, Usage(200, 0, 70))


@pytest.mark.parametrize("junk", ["", "{", "[]", '{"spent": {"a": 5}, "on_its_way": []}', '{"spent": {}}', "\x00"])
def test_a_file_that_is_none(tmp_path, junk):
    path = tmp_path / "spent.json"
    path.write_text(junk)
    with pytest.raises(UserError, match="spent.json, which keeps what was spent, cannot be read"):
        Purse("k", PRICE, BudgetConfig(), path)


def test_nothing_is_asked_that_cannot_be_written_down(tmp_path):
    purse = Purse("k", PRICE, BudgetConfig(), tmp_path / "books" / "spent.json")
    (tmp_path / "books").write_text("")
    with ChatServer(always(said("x"))) as server:
        answers, _ = ask(server.url, 3, EndpointConfig(timeout=5), purse)
    assert not server.requests
    assert all("which keeps what k has spent, cannot be written" in str(answer) for answer in answers)


def test_many_threads_pay_from_one_purse(tmp_path):
    purse = Purse("k", PRICE, BudgetConfig(requests=150), tmp_path / "spent.json")
    refused = []

    async def one():
        try:
            async with purse.pay("me", Usage(1, 0, 1)) as bill:
                await asyncio.sleep(0.001)
                bill.settle(Usage(1, 0, 1))
        except BudgetSpentError:
            refused.append(1)

    async def fifty():
        await asyncio.gather(*(one() for _ in range(50)))

    threads = [threading.Thread(target=lambda: asyncio.run(fifty())) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(refused) == 50 and purse.total == Spent(150, 0, Usage(150, 0, 150))
    kept = json.loads((tmp_path / "spent.json").read_text())
    assert kept["spent"]["me"]["requests"] == 150 and kept["on_its_way"] == []
