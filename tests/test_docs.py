"""Tests of the documents: commands compose or run, snippets work, and every file and test of the ledger exists."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from mtrl import track
from mtrl.cli.command import answer
from mtrl.cli.command import find as find_command
from mtrl.command.compose import compose
from mtrl.config.keys import find
from mtrl.config.schema import Config
from mtrl.diagnose import __main__ as diagnose
from mtrl.diagnose.walk import RULES
from mtrl.doctor import __main__ as doctor
from mtrl.errors import UserError
from mtrl.evaluation import settings as evaluate_settings
from mtrl.figures import __main__ as figures
from mtrl.gateway import __main__ as gateway
from mtrl.main import prepare
from mtrl.play import __main__ as play
from mtrl.record.run_dir import RunDir
from mtrl.rescore import __main__ as rescore
from mtrl.rescore.__main__ import check_read
from mtrl.rewards import shaping
from mtrl.view import __main__ as view
from tests import forked
from tests.engines.real.installed import engine_python
from tests.small_models import SMALLER_POLICY

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "envs/*/README.md", "examples/**/*.md", "experiments/**/*.md")
    for path in ROOT.glob(pattern)
)
LEDGER = ROOT / "docs" / "requirements.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
FILE = r"(conf|docs|envs|examples|experiments|mtrl|scripts|tests|benchmarks)/|[A-Z]+(\.md)?$|Makefile$|setup\.py$"
"""Pattern of a file of this tree in the ledger."""


def blocks(path, language):
    return [text for kind, text in BLOCK.findall(path.read_text(encoding="utf-8")) if kind == language]


def commands(path):
    """Return the commands of a document's bash blocks, each as a list of words."""
    lines = "".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    return [spelled_out(words) for line in lines if (words := shlex.split(line, comments=True))]


def spelled_out(words):
    """Return `mtrl train …` as `mtrl train …`, and other commands unchanged."""
    if Path(words[0]).name != "mtrl" or answer(words[1:]) is not None:
        return words
    module, rest = find_command(words[1:])
    return ["python", "-m", module, *rest]


def label(words):
    return " ".join(words)


ALL_COMMANDS = {label(words): words for path in DOCUMENTS for words in commands(path)}


def is_training(words):
    return words[0].endswith(("python", "torchrun")) and "-m mtrl.main" in label(words)


def overrides_of(words):
    """Return the overrides that a training command, or a make command with ARGS, passes to `mtrl.main`."""
    if is_training(words):
        return words[words.index("mtrl.main") + 1 :]
    return next((shlex.split(word.removeprefix("ARGS=")) for word in words if word.startswith("ARGS=")), [])


TRAINING = {name: words for name, words in ALL_COMMANDS.items() if is_training(words) or "ARGS=" in name}


@cache
def shown_files():
    """Return the files that the documents show, by name, and the configuration of one earlier run."""
    texts = [text for path in DOCUMENTS for text in blocks(path, "python")]
    files = {name[1]: text for text in texts if (name := re.match(r"# (\w+\.py)\n", text))}
    return files | {"outputs/gsm8k/earlier/config.yaml": OmegaConf.to_yaml(compose(), resolve=True)}


@pytest.fixture
def snippets(tmp_path, monkeypatch):
    """Make a folder with the files that the documents show and with one earlier run, and change to it."""
    (tmp_path / "outputs" / "gsm8k" / "earlier").mkdir(parents=True)
    for name, text in shown_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def installed(monkeypatch):
    """Let the checks find both engines; no server is started."""
    for engine in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"MTRL_{engine}_PYTHON", sys.executable)


def test_there_are_documents_and_commands():
    assert {"README.md", "AGENTS.md", "CONTRIBUTING.md", "requirements.md"} <= {path.name for path in DOCUMENTS}
    assert {"make train", "make test"} <= ALL_COMMANDS.keys()
    assert len(TRAINING) > 10


OTHERS = {name: words for name, words in ALL_COMMANDS.items() if not is_training(words)}


def play_composes(words):
    own, overrides = play.split_words(words)
    play.choices_of(own)
    compose(overrides)


def rescore_composes(words):
    """Compose the settings on the default experiment and on text_to_sql, since the run is the reader's own."""
    source, *rest = words
    _, overrides = rescore.split_out([word for word in rest if word != "--json"])
    if source.endswith(".jsonl"):
        compose(overrides)
        return
    for override in overrides:
        check_read(override)
    tried = []
    for experiment in ("gsm8k", "text_to_sql"):
        with suppress(UserError):
            tried.append(compose([f"experiment={experiment}", *overrides]))
    assert tried


def evaluate_composes(words):
    """Compose with the earlier run of the default experiment in place of the reader's run."""
    earlier = "outputs/gsm8k/earlier"
    words = [word if "=" in word else re.sub(r"^outputs/\w+/RUN", earlier, word) for word in words]
    evaluate_settings.configuration(evaluate_settings.Words.of(words), None)


def doctor_composes(words):
    args = doctor.parse(words)
    assert not args.plan or doctor.make_plan(args.overrides).moments


def gateway_composes(words):
    _, overrides = gateway.GatewaySettings.of(words)
    compose(overrides)


OTHER_OVERRIDES = {
    "mtrl.doctor": doctor_composes,
    "mtrl.gateway": gateway_composes,
    "mtrl.play": play_composes,
    "mtrl.rescore": rescore_composes,
    "mtrl.evaluate": evaluate_composes,
    "mtrl.diagnose": diagnose.parse,
    "mtrl.view": view.parse,
    "mtrl.figures": figures.parse,
    "mtrl.track": track.parse,
}


def test_commands_that_play_and_rescore_are_composed():
    """Wrong words are refused, so that the tests of the documents' commands can fail."""
    play_composes(["+experiment=text_to_sql", "row=3", "player=gold"])
    rescore_composes(["outputs/RUN", "reward.scheme=skyrl", "--json"])
    for composes, words in (
        (play_composes, ["split=dev"]),
        (play_composes, ["experiment=none_such"]),
        (rescore_composes, ["outputs/RUN", "trainer.max_steps=3"]),
    ):
        with pytest.raises(UserError):
            composes(words)


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS.keys())
def test_other_commands_name_existing_programs_and_settings(words, snippets):
    program = Path(words[0]).name
    if program == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif program == "python" and words[1] == "-m" and words[2].startswith(("mtrl.", "experiments.")):
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        OTHER_OVERRIDES.get(words[2], lambda rest: None)(words[3:])
    elif program == "python" and words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word.partition("::")[0]).exists() for word in words[3:] if not word.startswith("-"))
    elif program == "python":
        assert (ROOT / words[1]).exists()
    elif program == "mtrl":
        assert answer(words[1:])
    elif program == "bash":
        subprocess.run(["bash", "-n", ROOT / words[1]], check=True, capture_output=True)
    elif program == "pip":
        extras = re.findall(r"\.\[([\w,]+)\]", label(words))
        assert all(f'"{extra}": ' in (ROOT / "setup.py").read_text() for group in extras for extra in group.split(","))
    elif program == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").exists()
    else:
        assert words == [".", ".venv/bin/activate"], "a kind of command that no test runs"


def run(words, folder, *more):
    """Run a training command on one thread and return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [sys.executable, "-m", "mtrl.main", *overrides_of(words), *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


ELSEWHERE = re.compile(
    r"openai/|model\.path=|_hf|validation_rows|resume=|debug=|--cfg|vault|torchrun|urls=|"
    r"smollm2|ruler|rollouts\.workers|teacher\.path=|tracker=mlflow|main -m |mini_swe_agent\.FAMILY"
)
"""Commands with downloads, and commands that other tests run: the real model (tests/models/test_smollm2.py), the judge
of groups (tests/rewards/test_ruler.py), workers and a teacher (tests/trainer/test_run_{workers,distillation}.py),
MLflow (tests/trackers/test_follow_mlflow.py, and the command with all trackers), sweeps
(tests/sweep/test_sweep_runs.py), and the settings of experiment=agent_mini_swe, written one by one."""
RUNNABLE = {name: words for name, words in TRAINING.items() if not ELSEWHERE.search(name)}


def engine_of(words):
    """Return the name of the engine that a command needs, or None."""
    found = [re.fullmatch(r"generator(?:\.backend)?=(vllm|sglang)", word) for word in words]
    return next((match[1] for match in found if match), None)


SERVED = {name: words for name, words in RUNNABLE.items() if engine_of(words)}


def short_run_of(words):
    """Return the overrides that distinguish the short run of a command from those of other commands: the test itself
    sets the number of steps and the folder, and another seed runs the same code."""
    replaced = ("trainer.max_steps=", "run_dir=", "seed=")
    return tuple(sorted(word.lstrip("+") for word in overrides_of(words) if not word.startswith(replaced)))


UNSERVED = {short_run_of(words): words for name, words in RUNNABLE.items() if name not in SERVED}
UNSERVED = {label(words): words for words in UNSERVED.values()}


COMPOSED = {name: words for name, words in TRAINING.items() if name not in UNSERVED}


def ranks_of(words):
    """Return the number of ranks that a command starts on all machines."""
    counts = re.findall(r"--(?:nproc-per-node|nnodes)[ =](\d+)", label(words))
    return math.prod(map(int, counts))


@pytest.mark.parametrize("words", COMPOSED.values(), ids=COMPOSED.keys())
def test_training_commands_compose(words, snippets, installed, monkeypatch):
    """Compose the commands that `test_training_commands_run` does not run, as on the ranks that they start."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks_of(words)))
    prepare(overrides_of(words))


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("words", SERVED.values(), ids=SERVED.keys())
def test_commands_with_servers_run(words, snippets):
    """Run the commands whose turns a server samples."""
    engine_python(engine_of(words))
    test_training_commands_run(words, snippets)


@pytest.mark.slow
@pytest.mark.parametrize("words", UNSERVED.values(), ids=UNSERVED.keys())
def test_training_commands_run(words, snippets):
    """Run each command with `debug=fast`, which does not change the keys that the command sets. Other tests draw curves
    and make the checks at the start, which take as long as the training, evaluate more rows and before the training,
    and start the engine of overlapping runs in a process of its own (tests/trainer/test_run_overlap.py)."""
    short = ["preflight.at_start=none", "diagnosis.live=none", "evaluation.rows=1", "evaluation.sampled_rows=1"]
    short += ["evaluation.every_steps=0", "evaluation.before_train=false", "generator.local.process=false"]
    short += ["model.warm_start.demonstrations=8", "model.warm_start.episodes=1"]
    unset = [word for word in short if word.partition("=")[0] not in label(words)]
    run(words, snippets, "debug=fast", *unset, "trainer.max_steps=1", "run_dir=run")
    assert list((snippets / "run").rglob("summary.json"))


@pytest.mark.slow
def test_an_ended_run_resumes_by_the_documented_command(tmp_path):
    run(["python", "-m", "mtrl.main"], tmp_path, "debug=fast")
    shown = run(["python", "-m", "mtrl.main", "resume=latest"], tmp_path, "debug=fast", "trainer.max_steps=3")
    (summary,) = (tmp_path / "outputs" / "gsm8k").glob("*/summary.json")
    assert "at step 2" in shown and json.loads(summary.read_text())["steps"] == 3


@pytest.mark.slow
@pytest.mark.ci
def test_the_environment_of_the_quickstart_is_learned(snippets):
    """A policy of half the width learns it."""
    words = next(words for name, words in TRAINING.items() if "vault.Vault" in name)
    run(words, snippets, *SMALLER_POLICY, "trainer.max_steps=30", "run_dir=run")
    summary = json.loads((snippets / "run" / "summary.json").read_text())
    assert summary["success_before"] < 0.2 and summary["success_sampled_before"] < 0.5
    assert summary["success_after"] > 0.9 and summary["success_sampled_after"] > 0.6


def test_the_environment_of_the_quickstart_runs_an_episode(snippets):
    from vault import Vault

    vault = Vault(max_turns=3)
    vault.reset({})
    assert vault.step("look", {"answer": "517"}) == (0.0, "517", False)
    assert vault.step("517", {"answer": "517"}) == (1.0, None, True)


def test_the_example_components_return_the_documented_rewards(snippets, monkeypatch):
    # The test of the command may have registered the component, and a second registration is an error.
    monkeypatch.setattr(shaping, "shaping", lambda name: lambda function: function)
    from parts import brief, repeats

    assert [brief([{"content": "x" * n}], {}, letters=3) for n in (3, 4)] == [1.0, 0.0]
    turns = [SimpleNamespace(text=text) for text in ("look", "4", "look", "look")]
    assert repeats(SimpleNamespace(turns=turns), {}) == [0.0, 0.0, -1.0, -1.0]


def test_the_quickstart_names_every_file_of_a_run():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    section = page.partition("A run leaves one folder")[2].partition("\n## ")[0]
    named = {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", section, re.MULTILINE)}
    values = [value.fget(RunDir("run")) for value in vars(RunDir).values() if isinstance(value, property)]
    contract = {value.name for value in values if isinstance(value, Path)}
    assert named == contract


def test_the_rules_of_the_diagnosis_are_documented_in_their_order():
    table = (ROOT / "docs" / "evaluation.md").read_text().partition("| rule |")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    assert documented == [(rule.name, rule.summary) for rule in RULES]


def test_the_tree_of_the_architecture_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith("  ") else ROOT / name
        assert (folder / name if line.startswith("  ") else folder).exists(), line


def test_the_files_that_the_architecture_names_exist():
    named = re.findall(r"`((?:mtrl|envs|conf|tests)/[\w/.]+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


# The ledger


def ledger():
    rows = re.findall(r"^\| (R\d{3}) \| (.+?) \| (.+?) \|$", LEDGER.read_text(encoding="utf-8"), re.MULTILINE)
    return {number: (what, evidence) for number, what, evidence in rows}


def shown(pattern):
    """Return the quoted words of the ledger's last column that match a pattern."""
    quoted = {word for _, evidence in ledger().values() for word in INLINE.findall(evidence)}
    return sorted(word for word in quoted if re.match(pattern, word))


def test_the_ledger_has_every_requirement_once_and_in_order():
    numbers = re.findall(r"^\| (R\d+) \|", LEDGER.read_text(encoding="utf-8"), re.MULTILINE)
    assert numbers == [f"R{n:03}" for n in range(1, 188)]
    assert list(ledger()) == numbers


def test_every_row_has_evidence():
    for number, (_, evidence) in ledger().items():
        assert INLINE.search(evidence) and not evidence.startswith("open"), number


def test_every_file_and_test_of_the_ledger_exists():
    for word in shown(FILE):
        path, _, name = word.partition("::")
        assert (ROOT / path).exists(), word
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), word


def test_commands_of_the_ledger_compose(installed):
    for command in shown("mtrl train"):
        compose(command.split()[2:])


def test_keys_and_metrics_of_the_ledger_exist():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mtrl").rglob("*.py"))
    assert not [word for word in shown("(rollout|val|analysis)/") if word not in source]
    sections = "|".join(field.name for field in fields(Config))
    assert not [word for word in shown(rf"({sections})\.") if not find(word)]
