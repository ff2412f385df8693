"""Code of a user in a folder outside of this tree: modules that register names, and functions by their path."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from mtrl.command.compose import compose
from mtrl.errors import UserError
from tests import forked

ROOT = Path(__file__).parents[2]

MINE = '''
"""What a researcher writes: one function of each kind."""
import numpy as np
import torch
from mtrl.algorithms.registry import advantage_estimator, kl_estimator, off_policy_correction, policy_loss, reduction
from mtrl.rewards.shaping import shaping

@advantage_estimator("best_only", aliases=("best",), needs_group=True, credits=("trajectory",))
def best_only(batch, config):
    return batch.broadcast(batch.groups.centre(batch.outcomes))

@policy_loss("plain")
def plain(tokens, config):
    return -tokens.advantages * tokens.logprobs, {"ratio": torch.ones_like(tokens.logprobs)}

@reduction("flat")
def flat(key, totals, config):
    return config.extra.get("scale", 1.0) / totals.tokens

@off_policy_correction("half")
def half(difference, tokens, config):
    return torch.full_like(difference, 0.5)

@kl_estimator("square")
def square(logprobs, ref_logprobs, old_logprobs):
    return (logprobs - ref_logprobs).square()

@shaping("first_turn")
def first_turn(trajectory, row):
    return [1.0] + [0.0] * (len(trajectory.turns) - 1)

def unregistered(batch, config):
    return np.zeros(batch.mask.shape)
'''


BROKEN = {
    "imports": "import no_such_package",
    "fails": "x = 1\nundefined",
    "misspelt": "def f(:",
    "taken": "from mtrl.algorithms.registry import advantage_estimator\n@advantage_estimator('grpo')\ndef f(b, c): ...",
    "aliased": "from mtrl.algorithms.registry import policy_loss\n@policy_loss('reinforce_is')\ndef f(b, c): ...",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder of a user with the package `lab`, and with modules that cannot be imported."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "lab").mkdir()
    (folder / "lab/__init__.py").touch()
    (folder / "lab/mine.py").write_text(MINE)
    for name, source in BROKEN.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def python(code: str, folder: Path) -> str:
    """Run code in the user's folder in a process of its own, so that the registries of this process do not change."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forked.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def method(name: str) -> str:
    return f"algorithm.advantage_method={name}"


PLUGIN = "plugins=[lab.mine]"
EVERY_KIND = [
    PLUGIN,
    method("best_only"),
    "algorithm.loss_fn=plain",
    "algorithm.loss_reduction=flat",
    "algorithm.off_policy_correction=half",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.kl_estimator=square",
    "reward.components.first_turn={weight: 0.5}",
    "algorithm.extra={scale: 2.0}",
]
NOTHING = "no warnings"
MENDED = "; correct the module"
PLACE = "; write package.module, from the current folder or installed"

SAID = {
    "a name without its plugin": ([method("best_only")], f"{method('best_only')} is not known; .*"),
    "a loss without its plugin": (["algorithm.loss_fn=plain"], "algorithm.loss_fn=plain is not known; .*"),
    "a plugin that is not there": (
        ["plugins=[nowhere]"],
        re.escape(f"plugins=[nowhere] cannot be imported (No module named 'nowhere'){PLACE}"),
    ),
    "a module that its package has not": (
        ["plugins=[lab.nowhere]"],
        re.escape(f"plugins=[lab.nowhere] cannot be imported (No module named 'lab.nowhere'){PLACE}"),
    ),
    "what a plugin imports": (
        ["plugins=[imports]"],
        re.escape(f"plugins=[imports] cannot be imported (No module named 'no_such_package'){MENDED}"),
    ),
    "an error in a plugin": (
        ["plugins=[lab,fails]"],
        re.escape("plugins=[fails] cannot be imported (NameError in fails.py, line 2: name 'undefined' is not defined)")
        + MENDED,
    ),
    "a plugin that is not Python": (
        ["plugins=[misspelt]"],
        re.escape(f"plugins=[misspelt] cannot be imported (invalid syntax (misspelt.py, line 1)){MENDED}"),
    ),
    "a plugin that takes a name of ours": (
        ["plugins=[taken]"],
        re.escape(
            "plugins=[taken] cannot be imported (ValueError in taken.py, line 2: algorithm.advantage_method=grpo is "
            f"already registered){MENDED}"
        ),
    ),
    "a plugin that takes a second name of ours": (
        ["plugins=[aliased]"],
        re.escape(
            "plugins=[aliased] cannot be imported (ValueError in aliased.py, line 2: algorithm.loss_fn=reinforce_is is "
            f"already registered){MENDED}"
        ),
    ),
    "a path without a plugin": ([method("lab.mine.unregistered")], NOTHING),
    "a path to a loss": (["algorithm.loss_fn=lab.mine.plain"], NOTHING),
    "a path to a reduction": (["algorithm.loss_reduction=lab.mine.flat"], NOTHING),
    "a path to a correction": (["algorithm.off_policy_correction=lab.mine.half"], NOTHING),
    "a path that keeps the traits it was registered with": (
        [method("lab.mine.best_only"), "algorithm.group_size=1"],
        f"algorithm.group_size=1 gives {method('lab.mine.best_only')} nothing to compare; set it to 2 or more",
    ),
    "every kind": (EVERY_KIND, NOTHING),
    "an alias": ([PLUGIN, method("best")], NOTHING),
    "a misspelt name": (
        [PLUGIN, method("best_olny")],
        f"{method('best_olny')} is not known; did you mean best_only\\? Choose one of .*",
    ),
    "the traits": (
        [PLUGIN, method("best_only"), "algorithm.credit=turn"],
        f"algorithm.credit=turn is not what {method('best_only')} has; choose one of trajectory, or null",
    ),
    "keys that our own methods would not read": ([PLUGIN, method("best_only"), "algorithm.gamma=0.5"], NOTHING),
}
"""Checked settings, in this order in one process, and the pattern of each message."""


def test_code_of_the_users_own_is_found_or_missed_in_one_sentence(project):
    code = (
        "import json\nfrom mtrl.command.checks import check\nfrom mtrl.command.compose import compose\n"
        "from mtrl.errors import UserError\nfrom tests.hydra_cache import caching\n"
        "def said(overrides):\n"
        "    try: return ' '.join(check(compose(overrides))) or 'no warnings'\n"
        "    except UserError as error: return str(error)\n"
        f"with caching(): print(json.dumps([said(line) for line in {[line for line, _ in SAID.values()]!r}]))"
    )
    answers = zip(SAID, json.loads(python(code, project)), strict=True)
    assert {case: said for case, said in answers if not re.fullmatch(SAID[case][1], said)} == {}


def test_registered_functions_of_a_plugin_run(project):
    code = f"""
import numpy as np, torch
from types import SimpleNamespace
from mtrl.command.compose import compose
from mtrl.algorithms.registry import find_correction, find_estimator, find_kl, find_loss, find_reduction
from mtrl.algorithms.batch import CreditBatch
from mtrl.algorithms.losses import TokenBatch
algorithm = compose({EVERY_KIND!r}).algorithm
rewards = np.array([[1.0], [0.0]])
batch = CreditBatch(rewards, rewards >= 0, np.ones((2, 1), int), np.zeros(2, int))
one = torch.ones(3)
print(
    find_estimator("best")(batch, algorithm).tolist(),
    find_loss("plain")(TokenBatch(one, one, one), algorithm)[0].tolist(),
    find_correction("half")(one, None, algorithm).tolist(),
    find_kl("square")(one, 3 * one, one).tolist(),
    find_reduction("flat")(None, SimpleNamespace(tokens=4), algorithm),
)
"""
    assert python(code, project) == "[[0.5], [-0.5]] [-1.0, -1.0, -1.0] [0.5, 0.5, 0.5] [4.0, 4.0, 4.0] 0.5\n"


def test_plugins_are_a_list():
    with pytest.raises(UserError) as caught:
        compose(["plugins=lab.mine"])
    assert str(caught.value) == "plugins=lab.mine must be a list of texts; write for example plugins=[text]"


def test_the_command_line_finds_plugins_and_files_in_the_folder_where_it_starts(project):
    """`cli` checks every job of a sweep before it hands over to Hydra, which is left out here."""
    (project / "conf/experiment").mkdir(parents=True)
    (project / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\nplugins: [lab.mine]\nenvironment: {config: {calculator: true}}\n"
    )
    argv = ["-m", "--config-dir", "conf", "experiment=mine", "algorithm.advantage_method=best_only,grpo"]
    code = (
        "import os, sys\nsys.path = [p for p in sys.path if p not in ('', os.getcwd())]\n"
        "import mtrl.main as main\n"
        "main.hydra.main = lambda **_: lambda job: lambda: sys.exit(print('handed over', sys.argv[1:]))\n"
        f"main.cli({argv!r})"
    )
    assert python(code, project).startswith(f"handed over {argv!r}"[:-1])
