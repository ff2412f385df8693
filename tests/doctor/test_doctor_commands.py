"""Every documented command that trains a language model fits the machine that it names, by the estimate of the plan."""

import re

import pytest

from mtrl.command.compose import merge
from mtrl.config.overrides import CONF, normalise
from mtrl.doctor.plan import plan_of
from tests.test_docs import TRAINING, overrides_of, snippets  # noqa: F401 - a fixture


def headers():
    """Yield the commands in the first lines of the experiments for real models."""
    for path in sorted((CONF / "experiment").glob("*_hf.yaml")):
        yield from re.findall(r"^# ((?:mtrl train|torchrun) .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)


def number(command, option):
    found = re.search(rf"--{option}[ =](\d+)", command)
    return int(found[1]) if found else 1


def composed(command, overrides):
    """Return the configuration of a command, with the ranks and machines that its launcher starts."""
    cfg = merge(normalise(overrides))
    if cfg.placement.name is None:
        cfg.placement.ranks, cfg.placement.machines = number(command, "nproc-per-node"), number(command, "nnodes")
    return cfg


DOCUMENTED = {name: overrides_of(words) for name, words in TRAINING.items()}
DOCUMENTED |= {command: re.split("mtrl train |mtrl.main ", command)[1].split() for command in headers()}
REAL = {name: words for name, words in DOCUMENTED.items() if re.search(r"_hf\b|model(\.path)?=(?!tiny)", name)}


def test_documents_name_commands_for_language_models():
    assert len(REAL) > 20


@pytest.mark.usefixtures("snippets")
@pytest.mark.parametrize("command", REAL)
def test_a_documented_command_fits_the_machine_that_it_names(command):
    cfg = composed(command, REAL[command])
    plan = plan_of(cfg)
    assert plan.fits, (plan.tightest, plan.crowd, plan.change)
    if cfg.placement.name is not None:
        assert plan.memory.layout.ranks_here == number(command, "nproc-per-node")
        assert cfg.placement.machines == number(command, "nnodes")
