"""The benchmark against TRL: its ratios, its refusals, the side of mtrl, and TRL where it is installed."""

import copy
import importlib.util
import json
import os
import stat
import sys
from pathlib import Path
from statistics import fmean

import pytest

from mtrl.errors import UserError
from tests.benchmark_runs import run_benchmark

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("benchmark_trl")]  # which share a measured step
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = (
    "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 2 --kv-heads 1 --prompts 2 --group-size 2 --tokens 4"
)
STAND_IN = f"""#!{sys.executable}
# A stand-in for an environment with TRL, with constant seconds and the requested numbers of tokens.
import json, sys

if "-c" in sys.argv:
    print("0.0.1")
    raise SystemExit
jobs, output = sys.argv[-2:]
results = []
for job in json.load(open(jobs)):
    episodes = len(job["prompts"][0]) * job["group_size"]
    sampled = episodes * job["turns"] * job["tokens"]
    seconds = {{"wall_s": 20.0, "cpu_s": 10.0}}
    step = {{
        "parts": dict.fromkeys(["generate", "forward", "backward", "rest"], seconds),
        "step": {{"wall_s": 80.0, "cpu_s": 40.0}},
        "tokens": {{
            "episodes": episodes,
            "prompts": episodes * 20,
            "tools": episodes * (job["turns"] - 1) * len(job["between"]),
            "sampled": sampled,
            "trained": sampled,
        }},
    }}
    machine = {{"torch": "0.1", "transformers": "0.2"}}
    results.append({{"peak_rss_mib": 1e6, "machine": machine, "steps": [step] * (len(job["prompts"]) - 1)}})
json.dump(results, open(output, "w"))
"""


def script(path, *lines):
    path.write_text("\n".join(lines))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The path of a stand-in for an interpreter with TRL."""
    return script(tmp_path_factory.mktemp("stand_in") / "python", STAND_IN)


@pytest.fixture(scope="module")
def found(tmp_path_factory, stand_in):
    """The output and the JSON of a benchmark with a tiny step of mtrl and the stand-in."""
    folder = tmp_path_factory.mktemp("trl")
    words = ["--threads", "1", "--rounds", "1", "--steps", "1", "--json", "found.json"]
    done = run_benchmark(folder, "trl.py", "--trl-python", stand_in, "--ways", "float32/4", "--sizes", SMALL, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def report():
    """The module that checks and prints runs."""
    spec = importlib.util.spec_from_file_location("benchmark_trl_report", BENCHMARKS / "trl_report.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scaled(result, **factors):
    """Return the steps with the time of each part multiplied by its factor; `others` is that of other parts."""
    result = copy.deepcopy(result)
    for step in result["steps"]:
        for name, part in step["parts"].items():
            part.update({clock: value * factors.get(name, factors["others"]) for clock, value in part.items()})
        for clock in step["step"]:
            step["step"][clock] = sum(part[clock] for part in step["parts"].values())
    return result


def test_small_steps_of_both_are_compared(found):
    output, result = found
    theirs, mine = result["runs"]
    assert (theirs["name"], mine["name"]) == ("TRL float32/4", "mtrl")
    for run in (theirs, mine):
        (step,) = run["result"]["steps"]
        assert step["tokens"]["sampled"] == step["tokens"]["trained"] == 2 * 2 * 3 * 4
    lines = output.splitlines()
    assert any(
        line.startswith("| TRL float32/4 | 40.0 | 10.0 | 10.0 | 10.0 | 30.0 | 1,000,000 | 4.80 |") for line in lines
    )
    assert any(line.startswith("| mtrl / TRL's best | ") for line in lines)
    assert "TRL 0.0.1 with torch 0.1, transformers 0.2" in output


def test_ratios_are_to_the_least_of_the_same_round(report, found):
    mtrl = scaled(found[1]["runs"][1]["result"], others=1.0)
    runs = []
    for number, slower in enumerate((1.0, 10.0)):  # a slow round affects all of its runs
        runs += [
            report.Run("mtrl", "mtrl", 1, number, scaled(mtrl, others=slower)),
            report.Run("TRL", "TRL a", 1, number, scaled(mtrl, generate=2 * slower, others=8 * slower)),
            report.Run("TRL", "TRL b", 1, number, scaled(mtrl, generate=4 * slower, others=4 * slower)),
        ]
    report.check(runs)
    (ratios,) = report.ratios(runs).values()
    assert ratios["generate"] == pytest.approx([1 / 2] * 2)
    for measure in ("forward", "backward", "training"):
        assert ratios[measure] == pytest.approx([1 / 4] * 2)
    assert ratios["peak RSS, MiB"] == [1.0] * 2
    assert all(1 / 4 <= ratio < 1 / 2 for ratio in ratios["step"])
    assert "| mtrl / TRL's best | " in report.table(runs) and " | 0.500 (0.500-0.500) | 0.250" in report.table(runs)


def test_steps_on_several_threads_are_timed_by_the_wall_clock(report, found):
    result = found[1]["runs"][0]["result"]
    assert report.Run("TRL", "TRL", 1, 0, result).figures["step"] == 40
    assert report.Run("TRL", "TRL", 2, 0, result).figures["step"] == 80
    assert report.Run("TRL", "TRL", 2, 0, result).figures[report.RATE] == 48 / 20


@pytest.mark.parametrize("key", ["sampled", "trained", "tools"])
def test_steps_with_different_work_are_refused(report, found, key):
    runs = [report.Run(side, side, 1, 0, scaled(found[1]["runs"][1]["result"], others=1.0)) for side in ("mtrl", "TRL")]
    runs[1].result["steps"][0]["tokens"][key] -= 1
    message = rf"not the same work: the number of {key} is \d+ in a step of TRL and \d+ in a step of mtrl"
    with pytest.raises(UserError, match=message):
        report.check(runs)


def test_a_side_that_does_not_learn_its_lesson_is_reported(report):
    lesson = {"lesson": {"most": 9, "enough": 0.5, "lr": 0.1}, "steps": {"TRL": [4, 10], "mtrl": [3, 5]}}
    lesson |= {"median": {"TRL": 7.0, "mtrl": 4.0}, "ahead": [0.1, 0.3], "had": 3}
    lines = report.lesson_table(lesson).splitlines()
    assert lines[-4:-2] == ["| TRL | 4 | more than 9 | 7 |", "| mtrl | 3 | 5 | 4 |"]
    assert lines[-1].endswith("mtrl minus TRL with the same start: +0.2000, standard error 0.1000")
    assert "of the first 3 steps" in lines[-1]


def test_mtrl_learns_its_lesson(tmp_path):
    """The mean over eight seeds rises; the rise of one seed depends on the processor (.19 or .32)."""
    words = [*SMALL.split(), "--group-size", "8"]
    lessons = [{"words": [*words, "--seed", str(n)], "lr": 0.02, "enough": 0.9, "most": 12} for n in range(8)]
    (tmp_path / "lessons.json").write_text(json.dumps([*lessons, lessons[0] | {"enough": 0.01}]))
    done = run_benchmark(tmp_path, "trl_learning.py", "lessons.json", "results.json")
    assert done.returncode == 0, done.stderr[-4000:]
    *whole, short = (lesson["rewards"] for lesson in json.loads((tmp_path / "results.json").read_text()))
    assert all(1 < len(rewards) <= 12 and 0 < rewards[0] < 0.4 for rewards in whole)
    # The mean rise is about .34 with a standard error of .036, so that .15 is five of them away.
    assert fmean(rewards[-1] - rewards[0] for rewards in whole) > 0.15
    assert short == whole[0][:1]


def test_a_missing_trl_is_one_sentence(tmp_path):
    without = script(tmp_path / "without", "#!/bin/sh", "exit 1")
    for python, message in (
        (str(tmp_path / "none"), f"--trl-python={tmp_path / 'none'} is no program; give the interpreter"),
        (without, f"--trl-python={without} has no TRL; give the interpreter"),
        ("", "neither --trl-python nor MTRL_TRL_PYTHON is set; give the interpreter"),
    ):
        done = run_benchmark(tmp_path, "trl.py", "--trl-python", python)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(message) and "pip install torch" in line


def test_a_process_that_fails_is_shown(tmp_path):
    broken = script(
        tmp_path / "broken", "#!/bin/sh", 'case "$*" in *version*) echo 1.0;; *) echo out of luck; exit 3;; esac'
    )
    done = run_benchmark(tmp_path, "trl.py", "--trl-python", broken, "--sizes", SMALL)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == ["out of luck", "trl_step.py ended with 3; see its output above"]


def test_an_unknown_mode_of_trl_is_refused(tmp_path):
    done = run_benchmark(tmp_path, "trl.py", "--ways", "float16/4")
    assert done.returncode == 2
    assert "'float16/4' is not DTYPE/COMPLETIONS" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def trl_python():
    if not (python := os.environ.get("MTRL_TRL_PYTHON")):
        pytest.skip("TRL is not installed; name the interpreter of an environment that has it: MTRL_TRL_PYTHON")
    return python


@pytest.mark.slow
def test_trl_does_the_same_work(tmp_path, trl_python):
    ways = ["float32/4", "bfloat16/2", "float32/2/kept", "bfloat16/4/compiled"]
    words = ["--threads", "1", "--rounds", "1", "--steps", "1", "--json", "found.json", "--sizes", SMALL]
    done = run_benchmark(tmp_path, "trl.py", "--trl-python", trl_python, "--ways", *ways, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [*(f"TRL {way}" for way in ways), "mtrl"]
    for run in runs:
        (step,) = run["result"]["steps"]
        for clock in ("wall_s", "cpu_s"):
            parts = [part[clock] for part in step["parts"].values()]
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(step["step"][clock], rel=0.01, abs=1e-3)
        # A run of 4 episodes of 3 turns of 4 tokens, prompts of 20, 20 between turns.
        counts = {"episodes": 4, "prompts": 80, "tools": 160, "sampled": 48, "trained": 48}
        assert step["tokens"] | counts == step["tokens"]


@pytest.mark.slow
def test_trl_learns_the_same_lesson(tmp_path, trl_python):
    words = ["--learning", "--sizes", SMALL, "--lr", "0.02", "--seeds", "2", "--most", "3", "--json", "found.json"]
    done = run_benchmark(tmp_path, "trl.py", "--trl-python", trl_python, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    (lesson,) = json.loads((tmp_path / "found.json").read_text())["lessons"]
    assert lesson["steps"] == {"TRL": [4, 4], "mtrl": [4, 4]}
    assert lesson["had"] == 3 and len(lesson["ahead"]) == 2
    for runs in lesson["rewards"].values():
        assert all(0 < reward < 1 for run in runs for reward in run) and all(len(run) == 3 for run in runs)
