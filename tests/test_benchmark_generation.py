"""The benchmark of generation: its bound, its sampled tokens, and the table that follows from both."""

import asyncio
import importlib
import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtrl.types import FinishReason, Generation
from tests.benchmark_runs import run_benchmark

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parent.parent
OURS = ("generation", "generation_bound", "generation_samplers", "engines", "step")
BURN = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark, which are imported only for a test, because their names are generic."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in reversed(OURS)})
    for name in OURS:
        del sys.modules[name]


@pytest.fixture
def model(bench):
    """A model with the sizes of `--quick`."""
    quick = bench.generation.QUICK
    sizes = bench.step.Sizes(
        hidden_size=quick.hidden_size, intermediate_size=quick.intermediate_size, layers=quick.layers,
        heads=quick.heads, kv_heads=quick.kv_heads, vocabulary=quick.vocabulary,
    )  # fmt: skip
    return bench.step.make_policy(sizes, SimpleNamespace(eos_token_id=0, pad_token_id=0), 64)


@torch.inference_mode()
def test_the_flops_and_bytes_of_a_pass_equal_those_of_the_model(bench, model):
    of = bench.generation.QUICK.geometry
    assert of.weights == sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    model.set_attn_implementation("eager")  # attention whose products are counted
    cache = model(torch.ones(3, 5, dtype=torch.long), use_cache=True).past_key_values
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    step = bench.generation_bound.Pass(rows=3, held=5, new=1)
    assert step.flops(of) == counter.get_total_flops() > 0
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert step.bytes(of) == 4 * of.weights + held
    # A token attends to itself and the tokens before it, whether all are processed at once or one by one.
    many, *ones = bench.generation_bound.Pass(2, 0, 3), *(bench.generation_bound.Pass(2, held, 1) for held in range(3))
    head = 2 * 2 * of.vocabulary * of.hidden
    assert many.flops(of) == sum(one.flops(of) for one in ones) - 2 * head


def test_a_plan_feeds_every_token_but_the_last_once(bench):
    plan = list(bench.generation_bound.passes(rows=2, turns=3, prompt=5, observed=4, sampled=6))
    assert len(plan) == 3 * 6 and [step.new for step in plan if step.new > 1] == [5, 4 + 1, 4 + 1]
    assert all(after.held == before.held + before.new for before, after in pairwise(plan))
    assert plan[-1].held + plan[-1].new == 5 + 3 * 6 + 2 * 4 - 1


def test_the_bound_is_the_maximum_of_reading_and_multiplying_per_pass(bench):
    of, least = bench.generation.QUICK.geometry, bench.generation_bound.least_seconds
    plan = list(bench.generation_bound.passes(2, 1, 5, 4, 6))
    read, multiplied = (sum(getattr(step, what)(of) for step in plan) for what in ("bytes", "flops"))
    assert least(of, plan, 1.0, math.inf) == read and least(of, plan, math.inf, 1.0) == multiplied
    rates = (1.0, plan[0].flops(of) / plan[0].bytes(of) - 1e-9)  # only the first, longest pass is limited by products
    assert read < least(of, plan, *rates) < read + multiplied


def test_all_limits_of_the_machine_are_measured(bench, monkeypatch):
    monkeypatch.setattr(bench.generation_bound, "LARGE", 2**20)
    monkeypatch.setattr(bench.generation_bound, "SQUARE", 64)
    monkeypatch.setattr(bench.generation_bound.best, "__defaults__", (0.0, 1))
    limits = bench.generation_bound.measure_limits(bench.generation.QUICK.geometry, 2, 2**16)
    assert limits["memory"].keys() == {"copy", "triad", "read", "read as a step"}
    assert limits["gemm"].keys() == {"float32", "bfloat16"}
    rates = [*limits["memory"].values(), *(rate for each in limits["gemm"].values() for rate in each.values())]
    assert len(rates) == 8 and all(0 < rate < math.inf for rate in rates)


class Recorder:
    """An engine that samples the number of the turn, and records its requests."""

    def __init__(self, tokens):
        self.tokens, self.requests, self.opened, self.released = tokens, {}, [], []

    def open(self, name):
        self.opened.append(name)

    def release(self, name):
        self.released.append(name)

    async def generate(self, name, prompt, sampling):
        turns = self.requests.setdefault(name, [])
        turns.append((prompt, sampling))
        return Generation([1000 + len(turns)] * self.tokens, [0.0] * self.tokens, FinishReason.LENGTH, [])


def test_engines_get_growing_contexts(bench):
    wave = bench.generation.Cell(trajectories=2, turns=3).wave(7, bench.generation.QUICK)
    assert wave.sampled == 2 * 3 * 4 and wave != bench.generation.Cell(2, 3).wave(8, bench.generation.QUICK)
    engine = Recorder(tokens=4)
    asyncio.run(bench.generation_samplers.EngineSampler(engine).sample(wave))
    assert engine.opened == ["7/0", "7/1"] and sorted(engine.released) == engine.opened
    assert len({sampling.seed for turns in engine.requests.values() for _, sampling in turns}) == 2
    for index, name in enumerate(engine.opened):
        (first, _), (second, _), (third, sampling) = engine.requests[name]
        assert first == wave.prompts[index] and sampling.max_generate_length == 4 and not sampling.stop_token_ids
        assert second == first + [1001] * 4 + wave.observations[0][index]
        assert third == second + [1002] * 4 + wave.observations[1][index]
    with pytest.raises(SystemExit, match="a turn has 3 tokens instead of 4"):
        asyncio.run(bench.generation_samplers.EngineSampler(Recorder(tokens=3)).sample(wave))


def test_generate_samples_the_same_tokens_with_a_reused_cache(bench, model):
    wave = bench.generation.Cell(trajectories=2, turns=3).wave(1, bench.generation.QUICK)
    computed, sampled = {}, {}
    for keeps_cache in (False, True):
        sampler = bench.generation_samplers.HfSampler(model, keeps_cache)
        lengths, generate = computed.setdefault(keeps_cache, []), model.generate

        def record(*args, generate=generate, key=keeps_cache, **kwargs):
            sampled[key] = generate(*args, **kwargs)
            return sampled[key]

        model.generate = record
        hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args, to=lengths: to.append(args[0].shape))
        torch.manual_seed(0)
        asyncio.run(sampler.sample(wave))
        hook.remove()
        model.generate = generate
    assert sampled[False].sequences.shape == (2, 5 + 3 * 4 + 2 * 3)
    assert torch.equal(sampled[False].sequences, sampled[True].sequences)
    assert [shape[1] for shape in computed[False] if shape[1] > 1] == [5, 5 + 7, 5 + 2 * 7]
    assert [shape[1] for shape in computed[True] if shape[1] > 1] == [5, 3 + 1, 3 + 1]


def test_seconds_of_child_processes_are_counted(bench):
    meter = bench.generation_samplers.Meter()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = meter.read()
        child.communicate(b"\n")
    assert found["server_cpu_s"] > 0.18 and found["cpu_s"] >= found["server_cpu_s"] and found["wall_s"] >= 0


def run(folder, *words):
    return run_benchmark(folder, "generation.py", *words)


@pytest.mark.slow
def test_the_table_follows_from_the_rounds(tmp_path):
    done = run_benchmark(tmp_path, "generation.py", "--quick", "--json", "found.json", is_apart=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    (cell,) = found["cells"]
    (only,) = cell["rounds"]
    local, hf = only["engines"]["local"], only["engines"]["hf"]
    assert local["sampled"] == hf["sampled"] == 16 and local["server_cpu_s"] == 0
    assert all(one["tokens_per_cpu_s"] == one["sampled"] / one["cpu_s"] > 0 for one in (local, hf))
    ours, bound = local["tokens_per_cpu_s"], only["bound"]
    words = [ours, hf["tokens_per_cpu_s"], ours / hf["tokens_per_cpu_s"], bound["square"]]
    shares = [f"{ours / bound[matrices]:.0%}" for matrices in ("square", "own")]
    row = "2 | 2 | {:,.0f} | {:,.0f} | x {:.2f} | {:,.0f}".format(*words)
    assert done.stdout.splitlines()[-1] == f"| {row} | {' | '.join(shares)} |"
    assert done.stdout.startswith("2 trajectories, 2 turns, local: ")


@pytest.mark.parametrize("words", [["--turns", "4", "0"], ["--heads", "3"], ["--vocabulary", "9"]])
def test_sizes_that_measure_nothing_are_refused(tmp_path, words):
    done = run(tmp_path, *words)
    assert done.returncode == 2 and words[0] in done.stderr.splitlines()[-1]
