"""One real vLLM server: turns, pauses, aborts, errors, and weights by every way, against the trainer's own model."""

import asyncio
import itertools
import json
import shutil
import subprocess
from contextlib import asynccontextmanager
from copy import deepcopy

import httpx
import pytest
from engine_model import PARITY, changed, load_model, named_weights, reference_logprobs, worst
from jsonschema import Draft202012Validator
from listeners import listeners
from vllm_weights import WAYS, broadcast_group, update

from mtrl.distributed import broadcast
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.changes import TensorChanges
from mtrl.engines.server.server_api import Rendezvous, ServerError, ServerRefusedError, TensorLayout, TurnRequest
from mtrl.engines.vllm.vllm_api import VllmApi
from mtrl.types import FinishReason

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 84))
CONTEXT = 2048
"""Context in which a turn can take seconds."""
LONG = CONTEXT - len(PROMPT) - 1
WHOLE = 600
"""Number of tokens of a turn that is sampled to its end, which also takes seconds."""
TOKENS: dict[str, str] = {}
"""Token of each server, by its URL."""
BLOCK = 32
"""Number of tokens of a block of the prefix cache."""
_numbers = itertools.count()


def turn(prompt=PROMPT, max_tokens=32, cache_salt=None, **sampling) -> TurnRequest:
    return TurnRequest(f"turn-{next(_numbers)}", list(prompt), SamplingParams(**sampling), max_tokens, cache_salt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tied_model):
    """The tiny tied model, with a longer context."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tied_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module")
def server(serving, folder):
    served = serving("vllm", folder, context=CONTEXT, sync_timeout=60.0, request_timeout=90.0)
    TOKENS[served.url] = served.place.token
    return served


class Policy:
    """The trainer's side: a model that changes, and its version."""

    def __init__(self, folder):
        self.model, self.version = load_model(folder), 0

    def step(self):
        """Return the version and the weights after a training step."""
        self.version += 1
        return self.version, named_weights(changed(self.model, self.version))

    def distance(self, prompt, generation, temperature=1.0) -> float:
        expected = reference_logprobs(self.model, prompt, generation.token_ids, temperature)
        return worst(generation.logprobs, expected)


@pytest.fixture(scope="module")
def policy(folder):
    return Policy(folder)


async def metric(api, name) -> float:
    """Return a counter of vLLM."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKENS[api.url]}"}, trust_env=False) as client:
        page = (await client.get(f"{api.url}/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


@asynccontextmanager
async def sampling_now(api, request):
    """Start a turn, wait for its first tokens, and return its task."""
    before = await metric(api, "generation_tokens_total")
    task = asyncio.create_task(api.generate(request))
    try:
        async with asyncio.timeout(30):
            while await metric(api, "generation_tokens_total") < before + 3:
                assert not task.done(), f"it was over before: {task.result()}"
                await asyncio.sleep(0.01)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has_ended(api) -> bool:
    """Whether sampling stops long before the end of a long turn; vLLM updates its counters after the next turn."""
    for _ in range(10):
        await api.generate(turn())
        if not await metric(api, "num_requests_running"):
            return True
    return False


async def held_back(api):
    """Start a turn, check that it is not sampled now, and return its task."""
    before = await metric(api, "generation_tokens_total")
    task = asyncio.create_task(api.generate(turn()))
    await asyncio.sleep(0.5)
    assert await metric(api, "generation_tokens_total") == before and not task.done()
    return task


# -- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_trainer(server, policy, temperature):
    prompts = [[*PROMPT, i] for i in range(20, 28)]

    async def act(api):
        return await asyncio.gather(*(api.generate(turn(p, temperature=temperature, seed=9)) for p in prompts))

    for prompt, generation in zip(prompts, server.ask(act), strict=True):
        assert policy.distance(prompt, generation, temperature) < PARITY
        assert generation.finish == FinishReason.LENGTH and len(generation.token_ids) == 32
        assert generation.version_spans == [(policy.version, 32)]


def test_later_turns_use_the_cached_conversation(server, policy):
    async def act(api):
        context, found = list(PROMPT), []
        for _ in range(4):
            generation = await api.generate(turn(context, cache_salt="conversation"))
            assert policy.distance(context, generation) < PARITY
            found.append((len(context), generation.cached_tokens))
            context += [*generation.token_ids, *range(100, 120)]
        return found, (await api.generate(turn(context, cache_salt="another"))).cached_tokens

    found, elsewhere = server.ask(act)
    assert found[0][1] == 0
    for (before, _), (_, cached) in itertools.pairwise(found):
        assert cached >= before // BLOCK * BLOCK
    assert elsewhere == 0


def test_seed_and_position_determine_the_tokens(server):
    async def act(api):
        requested = [turn(seed=1), turn(seed=1), turn(seed=2), turn([*PROMPT[:-1], *PROMPT[-1:] * 2], seed=1)]
        return [(await api.generate(request)).token_ids for request in requested]

    first, again, other, later = server.ask(act)
    assert first == again
    assert first != other and first != later


def test_stop_tokens_and_stop_strings_stay_in_the_turn(server, tiny_tokenizer):
    async def act(api):
        free = (await api.generate(turn(seed=3))).token_ids
        by_id = await api.generate(turn(seed=3, stop_token_ids=(free[9],)))
        text = tiny_tokenizer.decode(free[9:12], skip_special_tokens=False)
        by_text = await api.generate(turn(seed=3, stop=(text,)))
        return free, by_id, text, by_text

    free, by_id, text, by_text = server.ask(act)
    assert by_id.token_ids == free[: free.index(free[9]) + 1] and by_id.finish == FinishReason.STOP
    ends = (n for n in range(len(free) + 1) if text in tiny_tokenizer.decode(free[:n], skip_special_tokens=False))
    assert by_text.token_ids == free[: next(ends)] and by_text.finish == FinishReason.STOP
    assert len(by_text.logprobs) == len(by_text.token_ids)


def test_top_p_and_top_k_restrict_tokens(server, policy):
    async def act(api):
        greedy = await api.generate(turn(temperature=0.0))
        return greedy, await api.generate(turn(top_k=1)), await api.generate(turn(top_p=1e-6))

    greedy, first, nucleus = server.ask(act)
    assert greedy.token_ids == first.token_ids == nucleus.token_ids


# -- aborts and pauses -----------------------------------------------------------------------------------------------


def test_an_aborted_turn_returns_the_tokens_sampled_so_far(server, policy):
    async def act(api):
        request = turn(max_tokens=LONG)
        async with sampling_now(api, request) as task:
            await api.abort(request.request_id)
            generation = await task
        assert await has_ended(api)
        await api.abort("never asked for")
        return generation

    generation = server.ask(act)
    assert generation.finish == FinishReason.ABORT and 0 < len(generation.token_ids) < LONG
    assert policy.distance(PROMPT, generation) < PARITY


def test_a_cancelled_turn_ends_on_the_server(server):
    async def act(api):
        async with sampling_now(api, turn(max_tokens=LONG)):
            pass
        return await has_ended(api)

    assert server.ask(act)


def test_a_paused_turn_continues_under_new_weights(server, policy):
    """Each token has the version and the log-prob of the weights that sampled it."""
    old = deepcopy(policy.model)
    version, weights = policy.step()

    async def act(api):
        async with sampling_now(api, turn(max_tokens=LONG)) as task:
            await update(api, WAYS["tensors"], weights, version, "continue")
            return await task

    generation = server.ask(act)
    (before, first), (after, second) = generation.version_spans
    assert (before, after) == (version - 1, version) and first + second == LONG
    prompt, ids = PROMPT, generation.token_ids
    assert worst(generation.logprobs[:first], reference_logprobs(old, prompt, ids[:first])) < PARITY
    assert worst(generation.logprobs[first:], reference_logprobs(policy.model, prompt, ids)[first:]) < PARITY
    assert worst(generation.logprobs[first:], reference_logprobs(old, prompt, ids)[first:]) > 100 * PARITY


def test_a_drained_turn_ends_under_old_weights(server, policy):
    version, weights = policy.step()

    async def act(api):
        async with sampling_now(api, turn(max_tokens=WHOLE)) as running:
            await api.pause("drain")
            try:
                async with asyncio.timeout(60):
                    old = await asyncio.shield(running)
                waiting = await held_back(api)
            finally:
                await update(api, WAYS["folder"], weights, version, "drain")
            return old, await waiting

    old, new = server.ask(act)
    assert old.version_spans == [(version - 1, WHOLE)]
    assert new.version_spans == [(version, 32)] and policy.distance(PROMPT, new) < PARITY


def test_an_abort_pause_ends_turns_with_their_tokens_so_far(server, policy):
    before = deepcopy(policy.model)
    version, weights = policy.step()

    async def act(api):
        async with sampling_now(api, turn(max_tokens=LONG)) as task:
            await update(api, WAYS["tensors"], weights, version, "abort")
            return await task, await api.generate(turn())

    old, new = server.ask(act)
    assert old.finish == FinishReason.ABORT and 0 < len(old.token_ids) < LONG
    assert old.version_spans == [(version - 1, len(old.token_ids))]
    assert worst(old.logprobs, reference_logprobs(before, PROMPT, old.token_ids)) < PARITY
    assert new.version_spans == [(version, 32)] and policy.distance(PROMPT, new) < PARITY


def test_a_paused_server_is_alive(server):
    async def act(api):
        await api.pause("continue")
        try:
            assert await api.is_alive()
            waiting = await held_back(api)
        finally:
            await api.resume()
        return await waiting

    assert server.ask(act).finish == FinishReason.LENGTH


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_new_weights_equal_those_of_the_trainer(server, policy, way):
    version, weights = policy.step()

    async def act(api):
        await api.generate(turn())  # fills the cache with keys and values of the old weights
        await update(api, WAYS[way], weights, version)
        return await api.generate(turn()), await api.generate(turn()), await api.version()

    first, cached, message = server.ask(act)
    assert message == version and first.version_spans == [(version, 32)]
    assert first.cached_tokens == 0 and cached.cached_tokens > 0
    assert max(policy.distance(PROMPT, first), policy.distance(PROMPT, cached)) < PARITY


def lost(weights):
    return {name: value for name, value in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}


def misnamed(weights):
    return {**weights, "model.layers.7.mlp.up_proj.weight": weights["model.norm.weight"]}


def misshaped(weights):
    return {**weights, "model.norm.weight": weights["model.norm.weight"][:-1]}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lost, "1 weights did not arrive: model.layers.1.self_attn.k_proj.weight"),
        (misnamed, "layers.7"),
        (misshaped, "63"),
    ],
)
def test_invalid_weights_are_reported_and_the_next_update_works(server, policy, damage, words):
    version, weights = policy.step()

    async def act(api):
        with pytest.raises(ServerError, match=words):
            await update(api, WAYS["tensors"], damage(weights), version)
        assert await api.version() == version - 1
        await update(api, WAYS["tensors"], weights, version)
        return await api.generate(turn())

    assert policy.distance(PROMPT, server.ask(act)) < PARITY


def test_a_wrong_checksum_is_reported(server, policy):
    weights = named_weights(policy.model)

    async def act(api, way):
        with pytest.raises(ServerError, match=r"checksum [0-9a-f]{64}, the trainer's is f00"):
            await update(api, way, weights, policy.version + 1, checksum="f00")
        with pytest.raises(ServerError, match="no safetensors file"):
            await api.begin_update()
            await api.receive_folder("/nonsense", 1)
        with pytest.raises(ServerError, match="does not rebuild a tensor"):
            await api.begin_update()
            await api.receive_tensors(["Y29zCnN5c3RlbQou"], 1)  # a pickle that names os.system
        assert await api.version() == policy.version

    server.ask(lambda api: act(api, WAYS["folder"]))
    server.ask(lambda api: act(api, WAYS["tensors"]))


def test_an_update_of_a_dead_trainer_is_abandoned(server, policy):
    version, weights = policy.step()

    async def act(api):
        await api.begin_update()
        await update(api, WAYS["tensors"], weights, version)
        return await api.generate(turn())

    assert policy.distance(PROMPT, server.ask(act)) < PARITY


def test_an_interrupted_broadcast_is_reported_and_the_server_survives(server, policy):
    async def act(api):
        async with broadcast_group(api, seconds=5.0) as (group, name):
            await api.begin_update()
            layouts = [TensorLayout("model.norm.weight", "float32", (64,))]
            receiving = asyncio.create_task(api.receive_broadcast(layouts, name, 1))
            await asyncio.sleep(0.2)
            assert await api.is_alive()
            broadcast.leave(group)
            with pytest.raises(ServerError):
                await receiving
        return await api.generate(turn())

    assert policy.distance(PROMPT, server.ask(act)) < PARITY


def test_the_server_sleeps_and_wakes(server, policy):
    """Without a GPU there is no memory to free, so the weights stay."""

    async def act(api):
        await api.sleep()
        await api.wake()
        return await api.generate(turn())

    assert policy.distance(PROMPT, server.ask(act)) < PARITY


# -- requests --------------------------------------------------------------------------------------------------------


def test_invalid_requests_are_refused_and_the_server_survives(server):
    async def act(api):
        for request, words in [
            (turn([5, 10**6]), "1000000 is out of vocabulary"),
            (turn([5] * (CONTEXT + 1)), f"maximum model length of {CONTEXT}"),
            (turn([]), "at least 1 item"),
            (turn(temperature=-1.0), "temperature"),
        ]:
            with pytest.raises(ServerRefusedError, match=words):
                await api.generate(request)
        return await api.generate(turn())

    assert server.ask(act).finish == FinishReason.LENGTH


def test_every_route_requires_the_token(server):
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
        known = {"Authorization": f"Bearer {server.place.token}"}
        paths = client.get("/openapi.json", headers=known).raise_for_status().json()["paths"]
        assert {"/health", "/pause", "/update_weights", "/inference/v1/generate"} <= set(paths)
        for path in [*paths, "/", "/metrics", "/docs", "/openapi.json", "/nonsense"]:
            for shown in [{}, {"Authorization": "Bearer wrong"}, {"Authorization": server.place.token}]:
                for method in ("GET", "POST", "OPTIONS", "DELETE"):
                    assert client.request(method, path, headers=shown).status_code == 401, (method, path)
        assert client.get("/health", headers=known).status_code == 200


def test_the_token_is_not_on_a_command_line_or_in_a_log(server):
    assert server.place.token not in server.process.log.read_text()
    assert server.place.token not in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


def test_all_processes_listen_only_on_loopback(server):
    found = listeners(server.process.pid)
    assert found and all(address.is_loopback for address in found), found


class Recorder:
    """Stand-in for `Http` that records requests."""

    def __init__(self):
        self.sent = []

    async def request(self, method, path, body=None, *, seconds, params=None):
        assert seconds > 0
        self.sent.append((method, path, json.loads(json.dumps(body)), params or {}))
        answers = {"/weight_info": {"weight_version": "3"}, "/reset_prefix_cache": {"success": True}}
        return answers.get(path, {})


async def send_everything(api: VllmApi):
    """Call every method with all kinds of its arguments."""
    await api.is_alive()
    full = SamplingParams(temperature=0.5, top_p=0.9, top_k=5, stop=("x",), stop_token_ids=(1,), seed=2**63)
    for request in (turn(), TurnRequest("r", [1], full, 3, "salt", "adapter"), turn(temperature=0.0)):
        with pytest.raises(ServerError):
            await api.generate(request)
    await api.abort("r")
    for mode in api.pause_modes:
        await api.pause(mode)
    await api.join(Rendezvous("127.0.0.1", 1, 2, 1, "gloo", "g"))
    await api.receive_broadcast([TensorLayout("a", "float32", (1, 2))], "g", 1, "00")
    await api.check_kept(1)
    await api.receive_changes([TensorChanges("a", "float32", (1, 2), 1, 1, 1)], "g", 1, 2, "00")
    calls = [
        api.resume(), api.begin_update(), api.receive_folder("f", 1), api.receive_tensors(["p"], 1, "00"),
        api.end_update(1), api.drop_cache(), api.leave("g"), api.load_adapter("a", "f"), api.drop_adapter("a"),
        api.version(), api.sleep(), api.wake(),
    ]  # fmt: skip
    for call in calls:
        await call


def test_every_request_matches_the_schema_of_the_server(server):
    recorder = Recorder()
    api = VllmApi(server.url, None, server.backend.settings, recorder)
    asyncio.run(send_everything(api))
    known = {"Authorization": f"Bearer {server.place.token}"}
    schema = httpx.get(f"{server.url}/openapi.json", headers=known, trust_env=False).json()
    assert len({path for _, path, _, _ in recorder.sent}) == 15
    for method, path, body, params in recorder.sent:
        operation = schema["paths"][path][method.lower()]
        assert set(params) <= {p["name"] for p in operation.get("parameters", ())}, path
        wanted = operation.get("requestBody")
        if body is not None and wanted is not None:
            check(body, wanted["content"]["application/json"]["schema"], schema)


def check(body, wanted, schema):
    """Valid, and without a field that the schema does not name where it names any."""
    Draft202012Validator({**wanted, "components": schema["components"]}).validate(body)
    while "$ref" in wanted:
        wanted = schema["components"]["schemas"][wanted["$ref"].rpartition("/")[2]]
    if "properties" in wanted:
        assert set(body) <= set(wanted["properties"])
        for name, value in body.items():
            if isinstance(value, dict):
                check(value, wanted["properties"][name], schema)
