"""A real SGLang server on a CPU, one for all tests here: turns, caches, pauses, aborts, errors, and its token."""

import asyncio
import random
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from engine_model import PARITY, named_weights
from listeners import listeners
from sglang_policy import LONG, Policy, long_model, turn_request

from mtrl.config.engine_schema import SglangConfig
from mtrl.engines.server.http import Http
from mtrl.engines.server.server_api import ServerError, ServerRefusedError, TensorLayout
from mtrl.engines.server.transports import make_sync
from mtrl.types import FinishReason

pytestmark = pytest.mark.slow

ENDLESS = LONG - 128
"""Number of tokens of a turn whose end the test does not wait for."""


@pytest.fixture(scope="module")
def start(tied_model, tmp_path_factory):
    return long_model(tied_model, tmp_path_factory.mktemp("sglang") / "start")


@pytest.fixture(scope="module")
def server(serving, start):
    return serving("sglang", start, context=LONG, max_num_seqs=8)


@pytest.fixture(scope="module")
def policy(start, tmp_path_factory):
    return Policy.of(start, tmp_path_factory.mktemp("policies"))


@pytest.fixture
def prompt(tiny_tokenizer):
    rng = random.Random(0)
    return [rng.randrange(5, len(tiny_tokenizer)) for _ in range(40)]


@asynccontextmanager
async def in_its_middle(api, request):
    """Start a turn, and wait until it is being sampled."""
    turn = asyncio.create_task(api.generate(request))
    while not (await api.waiting())[0]:
        assert not turn.done()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    yield turn
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_the_trainers_at_the_temperature_of_sampling(server, policy, prompt, temperature):
    turn = server.ask(lambda api: api.generate(turn_request(prompt, 64, temperature=temperature)))
    assert len(turn.token_ids) == 64 and turn.finish is FinishReason.LENGTH
    assert policy.distance(prompt, turn, temperature) < PARITY


def test_later_turns_use_the_cached_conversation(server, policy, prompt):
    async def scenario(api):
        context, cached = list(prompt), []
        for _ in range(4):
            turn = await api.generate(turn_request(context, 12, salt="conversation"))
            assert policy.distance(context, turn) < PARITY
            cached.append((turn.cached_tokens, len(context)))
            context += [*turn.token_ids, 7, 8, 9]
        other = await api.generate(turn_request(context, 12, salt="another"))
        return cached, other.cached_tokens

    cached, other = server.ask(scenario)
    assert cached[0][0] == 0
    for (_, before), (found, _) in pairwise(cached):
        assert found >= before + 12 - 1
    assert other == 0


def test_stop_tokens_and_stop_strings_stay_in_the_turn(server, prompt, tiny_tokenizer):
    async def scenario(api):
        whole = await api.generate(turn_request(prompt, 48, temperature=0.0))
        ids = whole.token_ids
        # A text that is first complete somewhere in the middle, and begins within a token.
        texts = [tiny_tokenizer.decode(ids[: n + 1], skip_special_tokens=False) for n in range(len(ids))]
        text = texts[20][-3:]
        by_text = await api.generate(turn_request(prompt, 48, temperature=0.0, stop=(text,)))
        by_id = await api.generate(turn_request(prompt, 48, temperature=0.0, stop_token_ids=(ids[10],)))
        return ids, texts, text, by_text, by_id

    ids, texts, text, by_text, by_id = server.ask(scenario)
    first = next(n for n, message in enumerate(texts) if text in message)
    assert by_text.finish is FinishReason.STOP and by_text.token_ids == ids[: first + 1]
    assert by_id.finish is FinishReason.STOP and by_id.token_ids == ids[: ids.index(ids[10]) + 1]
    assert len(by_id.logprobs) == len(by_id.token_ids)


def test_concurrent_turns_are_independent(server, policy, prompt):
    prompts = [prompt[n:] for n in range(12)]  # more than run at once

    async def scenario(api):
        return await asyncio.gather(*(api.generate(turn_request(p, 20)) for p in prompts))

    for p, turn in zip(prompts, server.ask(scenario), strict=True):
        assert policy.distance(p, turn) < PARITY


@pytest.mark.parametrize("mode", ["continue", "drain", "in_place", "abort"])
def test_weights_change_during_a_turn(server, policy, prompt, mode):
    old = policy.version
    tokens = ENDLESS if mode == "abort" else 600

    async def scenario(api):
        async with in_its_middle(api, turn_request(prompt, tokens)) as turn:
            await api.pause(mode)
            assert await api.is_alive() and not await api.is_ready()
            late = asyncio.create_task(api.generate(turn_request(prompt, 8, salt=f"version-{old + 1}")))
            await policy.update(api)
            if mode == "in_place":
                with pytest.raises(ServerError, match="Flush cache failed"):
                    await api.drop_cache()
            else:
                await api.drop_cache()
            assert await api.version() == old + 1 and not late.done()
            await api.resume()
            return await turn, await late

    turn, late = server.ask(scenario)
    assert late.version_spans == [(old + 1, 8)] and policy.distance(prompt, late) < PARITY
    versions = [version for version, _ in turn.version_spans]
    if mode == "continue":
        assert versions == [old, old + 1] and len(turn.token_ids) == tokens
        assert policy.distance(prompt, turn) < PARITY  # keys and values were computed again
    elif mode == "in_place":
        assert versions == [old, old + 1] and len(turn.token_ids) == tokens
        assert policy.distance(prompt, turn) > 100 * PARITY  # the trainer has to correct for the old keys
    elif mode == "abort":
        assert versions == [old] and turn.finish is FinishReason.ABORT and 0 < len(turn.token_ids) < tokens
        assert policy.distance(prompt, turn) < PARITY
    else:
        assert versions == [old] and turn.finish is FinishReason.LENGTH and len(turn.token_ids) == tokens
        assert policy.distance(prompt, turn) < PARITY
    server.ask(lambda api: api.drop_cache())


@pytest.mark.parametrize("way", ["disk", "distributed", "tensor"])
def test_every_weight_sync_gives_the_weights_of_the_trainer(server, policy, prompt, start, way):
    async def scenario(api):
        sync = make_sync(SglangConfig(weight_sync=way), model=str(start), dtype="float32", lora_scaling=None)
        try:
            for _ in range(2):  # a group is joined once, and used again
                policy.version += 1
                await api.pause("continue")
                await sync.send([api], named_weights(policy.model), policy.version)
                await api.drop_cache()
                await api.resume()
                assert await api.version() == policy.version
                turn = await api.generate(turn_request(prompt, 24))
                assert turn.version_spans == [(policy.version, 24)] and turn.cached_tokens == 0
                assert policy.distance(prompt, turn) < PARITY
        finally:
            await sync.close()

    server.ask(scenario)


def test_a_failed_update_leaves_no_session_open(server, policy, prompt):
    layout = TensorLayout("model.norm.weight", "float32", (64,))

    async def scenario(api):
        with pytest.raises(ServerRefusedError, match="Group nobody-met"):
            await api.receive_broadcast([layout], "nobody-met", 99)
        async with server.api() as another:  # as a trainer that was started again
            with pytest.raises(ServerRefusedError, match="Group nobody-met"):
                await another.receive_broadcast([layout], "nobody-met", 99)
        with pytest.raises(ServerRefusedError, match="does not exist"):
            await api.leave("nobody-met")
        await policy.update(api)
        await api.drop_cache()
        return await api.generate(turn_request(prompt))

    assert policy.distance(prompt, server.ask(scenario)) < PARITY


def test_an_aborted_turn_returns_the_tokens_sampled_so_far(server, policy, prompt):
    async def scenario(api):
        request = turn_request(prompt, ENDLESS)
        async with in_its_middle(api, request) as turn:
            await api.abort(request.request_id)
            return await turn

    turn = server.ask(scenario)
    assert turn.finish is FinishReason.ABORT and 0 < len(turn.token_ids) < ENDLESS
    assert policy.distance(prompt, turn) < PARITY


def test_turns_are_aborted_while_the_server_is_paused(server, policy, prompt):
    async def scenario(api):
        running, late = turn_request(prompt, ENDLESS), turn_request(prompt, ENDLESS)
        async with in_its_middle(api, running) as turn:
            await api.pause("continue")
            held = asyncio.create_task(api.generate(late))
            await asyncio.sleep(0.05)
            await api.abort(running.request_id)
            await api.abort(late.request_id)
            ended = await asyncio.wait_for(asyncio.gather(turn, held), 60)
            await api.resume()
            return ended

    turn, held = server.ask(scenario)
    assert turn.finish is held.finish is FinishReason.ABORT
    assert not held.token_ids
    # SGLang has lost the newest of one that gave up its place: they had not left its scheduler.
    assert len(turn.token_ids) < ENDLESS and policy.distance(prompt, turn) < PARITY


def test_aborting_a_turn_spares_one_with_a_longer_name(server, prompt):
    async def scenario(api):
        short, longer = turn_request(prompt, ENDLESS), turn_request(prompt, 400)
        longer = longer.__class__(f"{short.request_id}-1", longer.prompt, longer.sampling, longer.max_tokens)
        other = asyncio.create_task(api.generate(longer))
        async with in_its_middle(api, short) as turn:
            await api.abort(short.request_id)
            return await turn, await other

    turn, other = server.ask(scenario)
    assert turn.finish is FinishReason.ABORT and other.finish is FinishReason.LENGTH


def test_a_cancelled_turn_ends_on_the_server(server, prompt):
    async def scenario(api):
        async with in_its_middle(api, turn_request(prompt, ENDLESS)) as turn:
            turn.cancel()
            async with asyncio.timeout(60):
                while sum(await api.waiting()):
                    await asyncio.sleep(0.05)

    server.ask(scenario)


def test_invalid_requests_are_refused_and_the_server_survives(server, policy, prompt):
    async def refused(api):
        with pytest.raises(ServerRefusedError, match="longer than the model's context length"):
            await api.generate(turn_request(prompt * 60, 8))
        with pytest.raises(ServerRefusedError, match="exceeds the model's maximum context length"):
            await api.generate(turn_request(prompt, LONG))
        with pytest.raises(ServerRefusedError, match="temperature must be"):
            await api.generate(turn_request(prompt, temperature=-1.0))
        with pytest.raises(ServerError, match="weights"):
            await api.receive_folder("/no/such/folder", 99)
        http = Http(server.url, server.place.token)
        body = {"input_ids": prompt, "sampling_params": {"max_new_token": 4}}
        with pytest.raises(ServerRefusedError, match="unknown field `max_new_token`"):
            await http.request("POST", "/generate", body, seconds=60)
        await http.close()
        assert await api.waiting() == (0, 0)
        return await api.generate(turn_request(prompt))

    turn = server.ask(refused)
    assert policy.distance(prompt, turn) < PARITY


def test_the_server_sleeps_only_when_idle_and_wakes_once(server, prompt):
    async def scenario(api):
        async with in_its_middle(api, turn_request(prompt, ENDLESS)):
            with pytest.raises(ServerError, match="cannot sleep"):
                await api.sleep()
        async with asyncio.timeout(60):
            while sum(await api.waiting()):
                await asyncio.sleep(0.05)
        await api.sleep()
        assert await api.is_alive()
        await api.wake()
        await api.wake()
        assert (await api.generate(turn_request(prompt))).token_ids

    server.ask(scenario)


ROUTES = [
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("GET", "/v1/loads"),
    ("GET", "/ping"),
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/abort_request"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/begin_weight_update"),
    ("POST", "/update_weight_version"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/release_memory_occupation"),
]


@pytest.mark.parametrize("token", ["wrong", None])
def test_requests_without_the_token_are_refused(server, token):
    async def scenario():
        http = Http(server.url, token)
        for method, route in ROUTES:
            with pytest.raises(ServerRefusedError, match="HTTP 401"):
                await http.request(method, route, {} if method == "POST" else None, seconds=60)
        await http.close()
        if token is not None:
            async with server.api(token) as api:
                with pytest.raises(ServerRefusedError, match="HTTP 401"):
                    await api.is_ready()

    asyncio.run(scenario())


def test_the_token_is_not_on_a_command_line_or_in_a_log(server):
    token = server.place.token.encode()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(str(server.place.port).encode() in line for line in lines)
    assert not any(token in line for line in lines)
    log = server.process.log.read_bytes()
    assert b"api_key='***'" in log or b"'api_key': '***'" in log
    assert token not in log


def test_all_processes_listen_only_on_loopback(server):
    found = listeners(server.process.pid)
    assert found and all(address.is_loopback for address in found), found
