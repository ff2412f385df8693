"""The benchmarks run, and their numbers add up. Times are not tested."""

import importlib.util
import json

import pytest

from tests.benchmark_runs import ROOT, run_benchmark

pytestmark = pytest.mark.ci

SMALL = (
    "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 2 --kv-heads 1 "
    "--prompts 2 --group-size 2 --tokens 4 --steps 1"
)


def bench(folder, *more):
    """Run the benchmark of a step with a very small policy."""
    return run_benchmark(folder, "step.py", *SMALL.split(), *more)


def test_a_step_adds_up(tmp_path):
    done = bench(tmp_path, "--micro-batch-tokens", "100", "--json", "step.json")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "step.json").read_text())
    (step,) = result["steps"]
    assert step == result["best"]
    for clock in ("wall_s", "cpu_s"):
        parts = [part[clock] for part in step["parts"].values()]
        assert min(parts) > 0
        # What is missing is the time between the parts, in which another process may run.
        assert sum(parts) <= step["step"][clock] * 1.001
    assert 0 < sum(result["share"].values()) <= 1.001
    episodes, turns, tokens, between, prompt = 4, 3, 4, 20, 20
    assert step["tokens"] == {
        "episodes": episodes,
        "prompts": episodes * prompt,
        "tools": episodes * (turns - 1) * between,
        "sampled": episodes * turns * tokens,
        "trained": episodes * turns * tokens,
        "samples": episodes,
        "forwarded": episodes * (prompt + turns * tokens + (turns - 1) * between),
        # First each prompt, and its last token for the copy; later the new tokens and the last sampled token.
        "prefilled": 2 * (prompt + 1) + episodes * (turns - 1) * (between + 1),
    }
    assert [line.split()[0] for line in done.stdout.splitlines()[5:10]] == [*step["parts"], "step"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json"]


def test_impossible_sizes_are_refused(tmp_path):
    done = bench(tmp_path, "--tool-tokens", "3")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--tool-tokens must be at least 4")


FEW = "--groups 3 --group-size 4 --turns 2 --tokens 3 --words 2 --table-rows 2 --table-columns 5 --repeats 3"


def test_every_estimator_is_timed(tmp_path):
    from mtrl.algorithms.registry import ESTIMATORS

    done = run_benchmark(tmp_path, "advantages.py", *FEW.split(), "--json", "advantages.json")
    assert done.returncode == 0, done.stderr[-4000:]
    methods = json.loads((tmp_path / "advantages.json").read_text())["methods"]
    built_in = (ESTIMATORS.find(name) for name in ESTIMATORS.names())
    named = {entry.name for entry in built_in if entry.function.__module__.startswith("mtrl.")}
    assert set(methods) == {*named, "gae of a table"}
    for one in methods.values():
        assert len(one["wall"]) == len(one["cpu"]) == 3
        assert one["wall_ms"] == sorted(one["wall"])[1]
        assert one["least_cpu_ms"] == min(one["cpu"])
    printed = done.stdout.splitlines()
    assert [line[:24].strip() for line in printed[5 : 5 + len(methods)]] == list(methods)
    assert "other machines" in done.stdout


def test_too_few_repeats_and_groups_are_refused(tmp_path):
    for words, message in ((["--repeats", "0"], "at least 1"), (["--group-size", "3"], "at least 4")):
        done = run_benchmark(tmp_path, "advantages.py", *words)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith(f"{words[0]} must be {message}")


def test_a_step_in_bfloat16_has_weights_in_float32(tmp_path):
    done = bench(tmp_path, "--param-dtype", "bfloat16", "--turns", "1", "--json", "step.json")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "float32 computed in bfloat16" in done.stdout
    assert json.loads((tmp_path / "step.json").read_text())["best"]["tokens"]["trained"] == 4 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_update_is_compared_with_its_bound(tmp_path, dtype):
    small = "--samples 6 --mean-tokens 12 --turns 2 --hidden-size 32 --layers 1 --rounds 1 --micro-batch-tokens 40"
    done = run_benchmark(tmp_path, "update.py", *small.split(), "--dtype", dtype, "--json", "update.json")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "update.json").read_text())
    assert 0 < result["trained"] < result["tokens"]
    ways = result["ways"]
    assert ways["mtrl, packed"]["filled"] == 1 > ways["mtrl, padded"]["filled"] > 0.3
    bare = min(ways[f"bare, {rows}"]["cpu_s"][0] for rows in ("one by one", "equal rows"))
    for name, way in ways.items():
        assert way["tokens_per_cpu_s"] == pytest.approx(result["tokens"] / way["cpu_s"][0])
        assert way["share_of_bare"] == pytest.approx(bare / way["cpu_s"][0]), name
        assert name in done.stdout


def test_packed_matrices_are_timed_beside_plain_ones(tmp_path):
    sizes = "--hidden-size 256 --intermediate-size 520 --layers 1 --held 8 --repeats 2 --trajectories 2 5"
    done = run_benchmark(tmp_path, "matrices.py", *sizes.split())
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [
        line.strip("| ").split(" | ")
        for line in done.stdout.splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    assert [row[0] for row in rows] == ["2", "5"]
    assert all(float(row[-1]) < 1e-4 for row in rows), "other kernels give the same logits"


@pytest.mark.parametrize(
    ("script", "option", "value", "bound"),
    [
        ("checkpoints.py", "--rounds", "0", 1),
        ("containers.py", "--repeats", "0", 1),
        ("gateway.py", "--trajectories", "0", 1),
        ("gateway.py", "--delay", "-0.5", 0),
        ("logprobs.py", "--threads", "0", 1),
        ("matrices.py", "--trajectories", "0", 1),
        ("real_update.py", "--rounds", "0", 1),
        ("sandboxes.py", "--rows", "0", 1),
        ("shared_prefixes.py", "--rounds", "-1", 1),
        ("start.py", "--rounds", "-1", 0),
        ("update.py", "--rounds", "0", 1),
        ("viewer.py", "--repeats", "0", 1),
        ("weight_changes.py", "--steps", "0", 1),
        ("weight_sync.py", "--repeats", "0", 1),
    ],
)
def test_a_benchmark_without_work_is_refused(tmp_path, script, option, value, bound):
    done = run_benchmark(tmp_path, script, option, value)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"{script}: error: {option} must be at least {bound}"


ONE = """
import json, os, sys
job, *words = sys.argv[sys.argv.index("--one") + 1:]
print("a line before the result")
if json.loads(job) == "fail":
    sys.exit(3)
print(json.dumps([json.loads(job), words, os.environ["MTRL_TRIED"], os.getsid(0) == os.getpid()]))
"""


def test_a_measurement_runs_in_a_process_and_a_session_of_its_own(tmp_path):
    spec = importlib.util.spec_from_file_location("benchmark_apart", ROOT / "benchmarks" / "apart.py")
    apart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(apart)
    (tmp_path / "one.py").write_text(ONE)
    script = str(tmp_path / "one.py")
    result = apart.run_apart(script, {"turns": 2}, "local", ["seed=1"], limit=60, MTRL_TRIED="yes")
    assert result == [{"turns": 2}, ["seed=1"], "yes", True]
    with pytest.raises(SystemExit, match="local ended with 3; see above"):
        apart.run_apart(script, "fail", "local")
