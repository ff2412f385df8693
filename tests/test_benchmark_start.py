"""The benchmark of starts runs, and reports commands with another exit status. Times are not tested."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAKE = """
import sys
from pathlib import Path

if "--help" in sys.argv:
    print("help of {name}")
elif "experiment=gsm8k" in sys.argv:
    print("gsm8k in run", "preflight: 8 pass", "policy     0.69 M parameters on cpu", sep="\\n")
    print("evaluation at step 0 ---")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text({rows!r})
    print("1 0.343")
else:
    sys.exit("trainer.max_step=1 is not a key of mtrl")
"""
TRAINED = '{"step": 0}\n{"step": 1}\n'


@pytest.fixture
def start(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # the module imports another file of that folder
    spec = importlib.util.spec_from_file_location("benchmark_start", ROOT / "benchmarks" / "start.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """Function `tree(name)` that makes a checkout with a stand-in for mtrl."""

    def make(name, rows=TRAINED):
        package = tmp_path / name / "mtrl"
        package.mkdir(parents=True)
        (package / "main.py").write_text(FAKE.format(name=name, rows=rows))
        return str(tmp_path / name)

    return make


def test_the_starts_of_this_checkout_are_measured(start, tmp_path, capsys):
    words = ["--only", "python", "sweep help", "--no-step", "--rounds", "1", "--json", str(tmp_path / "start.json")]
    with pytest.raises(SystemExit):
        start.main(words)  # this command does not exist
    words[2] = "wrong key"
    assert start.main(words) == 0
    (measured,) = json.loads((tmp_path / "start.json").read_text())
    assert measured["faults"] == [] and measured["took"].keys() == {"python", "wrong key"}
    assert all(math.isfinite(took["cpu"]) for rounds in measured["took"].values() for took in rounds)
    assert "| wrong key | 2 |" in capsys.readouterr().out


def test_two_checkouts_are_measured_in_turns(start, tree, tmp_path, capsys):
    trees = [tree("old"), tree("new")]
    found = tmp_path / "start.json"
    assert start.main(["--trees", *trees, "--only", "help", "--rounds", "2", "--json", str(found)]) == 0
    for measured, name in zip(json.loads(found.read_text()), trees, strict=True):
        assert measured["tree"] == name and measured["took"].keys() == {"help", *start.MOMENTS, *start.LAST}
        assert {len(rounds) for rounds in measured["took"].values()} == {2}
        least = {at: min(took["wall"] for took in rounds) for at, rounds in measured["took"].items()}
        moments = [least[at] for at in (*start.MOMENTS, start.ENDED)]
        assert moments[0] > 0 and moments == sorted(moments)
        assert moments[0] <= least[start.STEPPED] <= moments[-1]  # the time of the next line
    shown = capsys.readouterr().out
    assert "CPU, last to first" in shown and shown.count("| help | 1.5 |") == 1


def test_an_unexpected_exit_status_is_reported(start, tree, capsys):
    assert start.main(["--trees", tree("one"), "--only", "wrong key", "--no-step", "--rounds", "0"]) == 1
    assert "wrong key ended with 1, not 2: trainer.max_step=1 is not a key of mtrl" in capsys.readouterr().out


def test_an_untrained_step_is_reported(start, tree, capsys):
    assert start.main(["--trees", tree("one", rows='{"step": 0}\n'), "--only", "--rounds", "0"]) == 1
    assert "the first step ended with 0: 1 0.343" in capsys.readouterr().out
