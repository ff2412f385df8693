"""Servers in memory with a model whose tokens and log-probs encode their context and the version of the weights, and an
event loop with virtual time."""

import asyncio
import itertools
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ClassVar

import torch

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server import replica
from mtrl.engines.server.backend import ServerBackend, ServerCommand
from mtrl.engines.server.engine import ServerEngine
from mtrl.engines.server.lora_sync import AdapterSync, adapter_name
from mtrl.engines.server.server_api import ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.engines.server.sync import SyncError
from mtrl.types import FinishReason, Generation

VOCABULARY = 50
CONTEXT = 200
TICK = 0.1
"""Seconds per token."""
STOP = 7
PROMPT = [3, 1, 4]
LONG = SamplingParams(max_generate_length=40)
SHORT = SamplingParams(max_generate_length=4)


def token_after(context, version):
    return (sum(context) * 7 + len(context) * 3 + version * 11) % VOCABULARY


def logprob_of(token, version):
    return -(version + 1 + token / 1000)


def weights_of(version):
    return {"weight": torch.tensor([float(version)])}


def check_turn(turn, prompt, sampling, versions=None):
    """Check that the turn has all its tokens, each as its version samples it, with its log-prob."""
    spans = [version for version, count in turn.version_spans for _ in range(count)]
    assert len(spans) == len(turn.token_ids) == len(turn.logprobs)
    context = list(prompt)
    for token, logprob, version in zip(turn.token_ids, turn.logprobs, spans, strict=True):
        assert token == token_after(context, version)
        assert logprob == logprob_of(token, version)
        context.append(token)
    assert all(a != b for (a, _), (b, _) in itertools.pairwise(turn.version_spans))
    assert versions is None or set(spans) <= set(versions)
    room = min(sampling.max_generate_length, CONTEXT - len(prompt))
    assert not set(turn.token_ids[:-1]) & set(sampling.stop_token_ids)
    if turn.token_ids[-1] in sampling.stop_token_ids:
        assert turn.finish == FinishReason.STOP
    else:
        assert turn.finish == FinishReason.LENGTH and len(turn.token_ids) == room


def run_engine(engine, coroutine, close=True):
    """Run a coroutine for at most an hour of virtual time."""

    async def whole():
        try:
            return await asyncio.wait_for(coroutine, 3600)
        finally:
            if close:
                await engine.close()

    return asyncio.run(whole())


def ask(engine, name="g/0", prompt=PROMPT, sampling=LONG):
    return asyncio.ensure_future(engine.generate(name, prompt, sampling))


class Flag:
    """Like `asyncio.Event`, for several event loops one after the other."""

    def __init__(self, value):
        self.value, self.waiting = value, []

    def set(self):
        self.value = True
        for future in self.waiting:
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)
        self.waiting = []

    def clear(self):
        self.value = False

    def is_set(self):
        return self.value

    async def wait(self):
        if not self.value:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]


class ToyServer:
    """The server that runs in a `ToyProcess`."""

    def __init__(self, start_seconds):
        self.start_seconds = start_seconds
        self.dead, self.awake, self.unpaused = Flag(False), Flag(True), Flag(True)
        self.version, self.mode, self.asleep = 0, None, False
        self.running = {}
        """Request id -> whether the request is aborted."""
        self.cache = {}
        """(salt, context) -> version of its keys and values."""
        self.adapters = {}
        """Version of the policy by the name of its adapter."""
        self.stale = 0
        """Number of turns that began with keys and values of older weights."""
        self.faults = []
        """Errors that the next turns get instead of an answer."""
        self.ignored = 0
        """Number of updates that are lost."""
        self.broken = set()
        """Calls that fail."""
        self.slow = 1
        self.most = 0
        self.begun = None

    async def answer(self, name):
        """Check that the server can answer."""
        await self.alive(self.awake.wait())
        if name in self.broken:
            raise ServerError(f"HTTP 500 {name} is broken")

    async def alive(self, waiting):
        """Wait while the server lives."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self.dead.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            if self.dead.is_set():
                raise ServerUnreachableError("ConnectError: all connection attempts failed")
        finally:
            for task in tasks:
                task.cancel()

    async def generate(self, request):
        await self.answer("generate")
        if self.faults:
            raise self.faults.pop(0)
        assert request.request_id not in self.running
        self.running[request.request_id] = False
        self.most = max(self.most, len(self.running))
        try:
            return await self._generate(request)
        finally:
            del self.running[request.request_id]

    async def _generate(self, request):
        context, out, cached = list(request.prompt), Generation([], [], FinishReason.LENGTH, []), 0
        await self.alive(self.unpaused.wait())
        if request.adapter is not None and request.adapter not in self.adapters:
            raise ServerRefusedError(f"HTTP 404 no adapter {request.adapter}")
        for length in range(len(context), 0, -1):
            if (found := self.cache.get((request.cache_salt, tuple(context[:length])))) is not None:
                cached = length
                self.stale += found != self.version
                break
        while len(out.token_ids) < request.max_tokens:
            await self.alive(asyncio.sleep(TICK * self.slow))
            await self.alive(self.awake.wait())
            if self.running[request.request_id]:
                out.finish = FinishReason.ABORT
                break
            await self.alive(self.unpaused.wait())
            assert not self.asleep
            sampler = self.version if request.adapter is None else self.adapters[request.adapter]
            token = token_after(context, sampler)
            context.append(token)
            out.token_ids.append(token)
            out.logprobs.append(logprob_of(token, sampler))
            out.version_spans.append((self.version, 1))
            if token in request.sampling.stop_token_ids:
                out.finish = FinishReason.STOP
                break
        self.cache[request.cache_salt, tuple(context)] = self.version
        out.cached_tokens = cached
        return out


class ToyApi:
    """See `ServerApi`."""

    pause_modes: ClassVar = {name: name for name in ("continue", "drain", "abort", "in_place")}

    def __init__(self, cluster, url):
        self.cluster, self.url = cluster, url

    @property
    def server(self):
        server = self.cluster.servers.get(self.url)
        if server is None or server.dead.is_set() or server.begun is None:
            raise ServerUnreachableError("ConnectError: all connection attempts failed")
        return server

    async def is_alive(self):
        try:
            async with asyncio.timeout(5):
                await self.server.answer("is_alive")
        except (TimeoutError, ServerError):
            return False
        return True

    async def is_ready(self):
        server = self.server
        return asyncio.get_running_loop().time() >= server.begun + server.start_seconds

    async def generate(self, request):
        return await self.server.generate(request)

    async def abort(self, request_id):
        await self.server.answer("abort")
        self.server.running[request_id] = True

    async def pause(self, mode):
        assert mode in self.pause_modes
        await self.server.answer("pause")
        self.server.unpaused.clear()
        self.server.mode = mode
        if mode == "abort":
            self.server.running = dict.fromkeys(self.server.running, True)

    async def resume(self):
        await self.server.answer("resume")
        self.server.unpaused.set()

    async def begin_update(self):
        await self.server.answer("begin_update")
        assert not self.server.unpaused.is_set(), "weights change only in a pause"

    async def receive_folder(self, folder, version):
        await self.server.answer("receive_folder")
        await asyncio.sleep(0.5)

    async def end_update(self, version):
        await self.server.answer("end_update")
        if self.server.ignored:
            self.server.ignored -= 1
        else:
            self.server.version = version

    async def drop_cache(self):
        await self.server.answer("drop_cache")
        if self.server.mode == "in_place" and self.server.running:
            raise ServerError("HTTP 400 Flush cache failed.")
        self.server.cache.clear()

    async def load_adapter(self, name, folder):
        await self.server.answer("load_adapter")
        await asyncio.sleep(0.5)
        assert name not in self.server.adapters
        self.server.adapters[name] = int(folder)

    async def drop_adapter(self, name):
        await self.server.answer("drop_adapter")
        del self.server.adapters[name]

    async def version(self):
        await self.server.answer("version")
        return self.server.version

    async def sleep(self):
        await self.server.answer("sleep")
        assert not self.server.running
        self.server.asleep = True

    async def wake(self):
        await self.server.answer("wake")
        self.server.asleep = False

    async def close(self):
        """There is nothing to close."""


class ToyProcess:
    """Replaces `ServerProcess`."""

    lost_port = False

    def __init__(self, cluster, command, log, name):
        self.server, self.name = cluster.new_server(*command.argv), name
        self.words, self.returncode = "", None

    @property
    def running(self):
        return not self.server.dead.is_set()

    async def wait(self):
        await self.server.dead.wait()

    def error_line(self):
        return self.words

    def end(self, grace=5.0):
        self.server.dead.set()
        return "was killed by SIGKILL"


class ToySync:
    """See `WeightSync`."""

    sent_bytes = 4

    def __init__(self):
        self.sent, self.error = [], None
        self.prepared = []
        """For each preparation its version, and whether the servers were paused."""
        self.is_paused = lambda: None

    async def prepare(self, weights, version):
        if self.error:
            raise self.error
        self.prepared.append((version, self.is_paused()))

    async def send(self, servers, weights, version):
        if self.error:
            raise self.error
        assert weights["weight"].item() == version
        failed = {}

        async def one(server):
            try:
                async with asyncio.timeout(30):
                    await server.begin_update()
                    await server.receive_folder("folder", version)
                    await server.end_update(version)
            except (ServerError, TimeoutError) as error:
                failed[server.url] = str(error) or "no answer"

        await asyncio.gather(*map(one, servers))
        self.sent.append((version, len(servers)))
        if failed:
            raise SyncError(failed)

    async def close(self):
        """There is nothing to close."""


class ToyAdapterSync(AdapterSync):
    """Weight sync of adapters, in which the name of the folder is the version."""

    sent_bytes = 4

    def __init__(self):
        pass

    async def send(self, servers, weights, version):
        failed = {}
        for server in servers:
            try:
                await server.load_adapter(adapter_name(version), str(version))
            except ServerError as error:
                failed[server.url] = str(error)
        if failed:
            raise SyncError(failed)

    async def close(self):
        """There is nothing to close."""


class Cluster:
    """A machine with servers."""

    def __init__(self):
        self.servers, self.processes, self.ports = {}, [], itertools.count(1)
        self.start_seconds = 20.0
        self.stillborn = 0
        """Number of servers that die while they start."""

    def new_server(self, url):
        server = self.servers[url] = ToyServer(self.start_seconds)
        server.begun = asyncio.get_running_loop().time()
        if self.stillborn:
            self.stillborn -= 1
            server.dead.set()
        return server

    def start_process(self, command, log, name):
        self.processes.append(ToyProcess(self, command, log, name))
        return self.processes[-1]

    @property
    def up(self):
        return [process.server for process in self.processes if process.running]


def make_engine(monkeypatch, cluster, sync=None, in_flight="continue", max_num_seqs=4, log_folder=Path(), **settings):
    """Return a `ServerEngine` whose servers are in memory. It runs on a `VirtualLoop`."""
    monkeypatch.setattr(replica, "ServerProcess", cluster.start_process)
    monkeypatch.setattr(replica, "free_port", lambda: next(cluster.ports))
    settings = ServerConfig(**settings)
    backend = ServerBackend(
        "toy",
        settings,
        lambda url, token: ToyApi(cluster, url),
        lambda place: ServerCommand([f"http://127.0.0.1:{place.port}"]),
    )
    return ServerEngine(
        backend,
        sync or ToySync(),
        vocabulary=VOCABULARY,
        context=CONTEXT,
        max_num_seqs=max_num_seqs,
        in_flight=in_flight,
        log_folder=log_folder,
    )


class Inline(Executor):
    """An executor that runs calls immediately instead of in a thread."""

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class StuckError(AssertionError):
    """All tasks of an event loop wait for each other."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that jumps to the time of the next timer if no task can continue. A loop without a timer is stuck."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._default_executor = Inline()
        select = self._selector.select

        def pass_time(timeout):
            if timeout is None:
                raise StuckError("nothing can go on")
            events = select(0)
            if not events and timeout > 0:
                self._now += timeout
            return events

        self._selector.select = pass_time

    def time(self):
        return self._now

    async def shutdown_default_executor(self, timeout=None):
        """Do nothing: the loop has no threads."""


class VirtualPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        return VirtualLoop()
