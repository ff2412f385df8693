"""Two real servers of each engine, and what can happen to them: nothing is lost, every token's log-prob is the
trainer's for the weights that it says, and nothing is left of them."""

import asyncio
import errno
import os
import signal
from contextlib import suppress

import pytest
from engine_model import CONTEXT, PARITY, changed, load_model, named_weights, reference_logprobs, worst
from faulty_proxy import FaultyProxy

from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.server import disk_sync, replica
from mtrl.engines.server.engine import ServerEngine
from mtrl.engines.server.transports import make_sync
from mtrl.errors import UserError
from mtrl.types import FinishReason
from tests.engines.real.conftest import make_backend

pytestmark = pytest.mark.slow

LONG = SamplingParams(max_generate_length=250)
SHORT = SamplingParams(max_generate_length=8)
TURNS = 24
"""Number of turns: more than one server samples at the same time, and fewer than two do."""
SECONDS = 420
"""Time limit of a whole test in seconds; the second and third start of a server take most of it."""


class Drill:
    """An engine with two servers, each behind a proxy, and the trainer's models by their versions."""

    def __init__(self, name, model, folder, patch):
        self.proxies, self.patch, self.model = [], patch, model
        self.models = {0: load_model(model)}
        backend = make_backend(name, model, replicas=2, start_timeout=300.0, request_timeout=120.0, sync_timeout=60.0)
        make_api = backend.make_api
        object.__setattr__(backend, "make_api", lambda url, token: make_api(self.behind_proxy(url), token))
        self.vocabulary = self.models[0].config.vocab_size
        self.engine = ServerEngine(
            backend,
            make_sync(backend.settings, model=str(model), dtype="float32", lora_scaling=None),
            vocabulary=self.vocabulary,
            context=CONTEXT,
            max_num_seqs=16,
            in_flight="continue",
            log_folder=folder,
        )
        self.pids = set()

    def behind_proxy(self, url):
        if url.count(":") < 2:  # used only for its pause modes
            return url
        self.proxies.append(FaultyProxy(url))
        return self.proxies[-1].url

    @property
    def servers(self):
        """The servers that accept turns."""
        return self.engine.server_group.serving

    def note_processes(self):
        self.pids |= {server.process.pid for server in self.servers}

    def proxy_of(self, server):
        return next(proxy for proxy in self.proxies if proxy.url == server.api.url)

    def ask(self, i, sampling=LONG):
        return asyncio.ensure_future(self.engine.generate(f"{i // 4}/{i % 4}", self.prompt(i), sampling))

    def prompt(self, i):
        return [(7 * i + 3 * k) % self.vocabulary for k in range(20)]

    def check(self, turn, prompt, sampling=LONG):
        """Check that the turn is complete and was sampled by the weights of its versions."""
        assert (len(turn.token_ids), turn.finish) == (sampling.max_generate_length, FinishReason.LENGTH)
        begin = 0
        for version, count in turn.version_spans:
            end = begin + count
            theirs = reference_logprobs(self.models[version], prompt, turn.token_ids)[begin:end]
            assert worst(turn.logprobs[begin:end], theirs) < PARITY, (version, begin, end)
            begin = end
        assert begin == len(turn.token_ids)

    async def update(self):
        """Load weights of the next version."""
        version = len(self.models)
        self.models[version] = changed(load_model(self.model), seed=version)
        await self.engine.load_weights(named_weights(self.models[version]), version)

    async def until(self, condition, seconds=240.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.2)

    # -- events ------------------------------------------------------------------------------------------------------

    async def story(self):
        async with asyncio.timeout(SECONDS):
            try:
                self.note_processes()
                await self.one_is_killed_in_the_middle()
                await self.errors_and_delays()
                await self.a_conversation()
                await self.wrong_requests()
                await self.it_comes_back()
                await self.an_update_is_lost()
                await self.one_hangs()
                await self.the_disk_is_full()
            finally:
                await self.engine.close()
                for proxy in self.proxies:
                    proxy.close()

    async def one_is_killed_in_the_middle(self):
        """Update until some turn has two versions, and kill one server in the middle of its turns.

        Turns follow each other until the kill, and their first ones have different lengths, so that each server is
        usually in the middle of some turns. No turn starts while servers are about to pause, so the turns of a server
        that pauses late may all have one version.
        """
        answers, is_killed = [], asyncio.Event()

        async def ask_in_turn(i):
            sampling = SamplingParams(max_generate_length=10 * (i + 1))
            while sampling is not LONG or not is_killed.is_set():
                answers.append((i, sampling, await self.ask(i, sampling)))
                sampling = LONG

        asking = asyncio.gather(*map(ask_in_turn, range(TURNS)))
        await self.until(lambda: len({i for i, _, _ in answers}) == TURNS or asking.done())
        while not any(len(answer.version_spans) == 2 for _, _, answer in answers):
            await self.update()
            answered = len(answers)
            await self.until(lambda answered=answered: len(answers) >= answered + TURNS or asking.done())
        busiest = max(self.servers, key=lambda server: len(server.load.busy))
        assert busiest.load.busy
        os.kill(busiest.process.pid, signal.SIGKILL)
        is_killed.set()
        await asking
        for i, sampling, answer in answers:
            self.check(answer, self.prompt(i), sampling)
        stats = self.engine.stats
        sampled = sum(sampling.max_generate_length for _, sampling, _ in answers)
        assert (stats.prompt_tokens, stats.sampled_tokens) == (len(answers) * 20, sampled)
        assert stats.extra["resent"] > 0 and stats.extra["retries"] == stats.extra["resent"]

    async def errors_and_delays(self):
        """Let the remaining server answer late, and then not at all."""
        proxy, resent = self.proxy_of(self.servers[0]), self.engine.stats.extra["resent"]
        proxy.errors, proxy.delay = 3, 2.0
        turns = [self.ask(i, SHORT) for i in range(4)]
        for i, turn in enumerate(turns):
            self.check(await turn, self.prompt(i), SHORT)
        proxy.delay = 0.0
        assert proxy.errors == 0 and self.engine.stats.extra["resent"] > resent

    async def a_conversation(self):
        """Run a conversation whose second turn finds the first one in the cache."""
        prompt, sampling = [(5 * k) % self.vocabulary for k in range(100)], SamplingParams(max_generate_length=30)
        first = await self.engine.generate("talk/0", prompt, sampling)
        self.check(first, prompt, sampling)
        prompt = [*prompt, *first.token_ids, 1, 2, 3]
        second = await self.engine.generate("talk/0", prompt, sampling)
        self.check(second, prompt, sampling)
        self.engine.release("talk/0")
        assert first.cached_tokens < 32 <= 96 <= second.cached_tokens  # a first token may be another conversation's too

    async def wrong_requests(self):
        server = self.servers[0]
        with pytest.raises(UserError, match=f"the token id {self.vocabulary} at position 1"):
            await self.engine.generate("9/0", [1, self.vocabulary], SHORT)
        assert (await self.engine.generate("9/0", [1] * CONTEXT, SHORT)).finish == FinishReason.LENGTH
        self.check(await self.ask(2, SHORT), self.prompt(2), SHORT)
        assert server.process.running

    async def it_comes_back(self):
        """Wait until the killed server has restarted, with the newest weights."""
        await self.until(lambda: len(self.servers) == 2)
        self.note_processes()
        probes = await self.engine.probe(self.prompt(0), SHORT)
        assert [probe.version_spans for probe in probes] == [[(self.engine.version, 8)]] * 2
        for probe in probes:
            self.check(probe, self.prompt(0), SHORT)

    async def an_update_is_lost(self):
        """Lose the update of one server, which reports another version and gets the weights again."""
        proxy = self.proxy_of(self.servers[0])
        proxy.lost = 1
        await self.update()
        assert proxy.lost == 0 and len(self.servers) == 2
        for probe in await self.engine.probe(self.prompt(0), SHORT):
            assert probe.version_spans == [(len(self.models) - 1, 8)]
            self.check(probe, self.prompt(0), SHORT)

    async def the_disk_is_full(self):
        """Fill the disk in the middle of a file. No weights can be sent, so the run ends with the reason."""
        whole = disk_sync.write_model

        def half(*words):
            whole(*words)
            raise OSError(errno.ENOSPC, "No space left on device")

        self.patch.setattr(disk_sync, "write_model", half)
        for requested in (self.update(), self.ask(0)):
            with pytest.raises(EngineLostError, match=r"no space left.*sync_folder|sync_folder.*no space left"):
                await requested

    async def one_hangs(self):
        hanging = self.servers[1]
        process = hanging.process
        turns = [self.ask(i) for i in range(20, 36)]
        while len(hanging.load.busy) < 2:
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGSTOP)
        released = next(ticket.trajectory_id for ticket in hanging.load.busy)
        self.engine.release(released)
        aborted = int(released.split("/")[0]) * 4 + int(released.split("/")[1]) - 20
        assert (await turns[aborted]).finish == FinishReason.ABORT
        assert process.running and hanging in self.servers, "the abort has waited for the hanging server"
        for i, turn in enumerate(turns, start=20):
            if i - 20 != aborted:
                self.check(await turn, self.prompt(i))
        await self.until(lambda: not process.running, 60)
        assert self.engine.stats.extra["restarts"] == 2


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.ci
def test_two_servers_survive_all_drills(name, tied_model, tmp_path, monkeypatch):
    monkeypatch.setattr(replica, "HEALTH_CHECK_SECONDS", 3.0)
    drill = Drill(name, tied_model, tmp_path, monkeypatch)
    asyncio.run(drill.story())
    for pid in drill.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"the server's process {pid} is left")
