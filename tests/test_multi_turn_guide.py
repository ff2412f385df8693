"""The commands and snippets of the Multi-Turn Training Guide, with the name of this package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.keys import find

ROOT = Path(__file__).parent.parent
SQL = ["+experiment=text_to_sql", "generator.backend=sglang", "generator.max_turns=5"]


def shown(words, folder):
    done = subprocess.run([sys.executable, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}


@pytest.fixture(autouse=True)
def _sglang_as_if_installed(monkeypatch):
    monkeypatch.setenv("MTRL_SGLANG_PYTHON", sys.executable)


@pytest.mark.parametrize("module", ["mtrl.main", "mtrl", "mtrl.entrypoints.main_base"])
def test_the_entry_points_of_the_guide_work(module, tmp_path):
    """Every module name accepts the command; `tests/engines/real` and `tests/test_docs.py` run it."""
    cfg = shown(["-m", module, *SQL, "--cfg", "job"], tmp_path)
    assert cfg["name"] == "text_to_sql"
    assert cfg["generator"]["backend"] == "sglang" and cfg["generator"]["max_turns"] == 5


def test_the_scripts_and_folders_of_the_guide_exist():
    """`tests/examples/test_recipes.py` runs both scripts."""
    for name in (
        "turn_level_rewards/README.md", "turn_level_rewards/gsm8k_multi_turn_dataset.py",
        "turn_level_rewards/run_gsm8k_multi_turn.sh", "text_to_sql/sql.md", "search/README.md",
        "mini_swe_agent/README.md",
    ):  # fmt: skip
        assert (ROOT / "examples" / name).is_file(), name


SETTINGS = {
    "basic setup": """
generator:
  backend: sglang
  use_conversation_multi_turn: true  # REQUIRED for SGLang
  max_turns: 5                        # Maximum turns per episode

  sampling_params:
    max_generate_length: 1024
    temperature: 1.0
""",
    "SGLang requirement": """
generator:
  backend: sglang
  use_conversation_multi_turn: true  # SGLang REQUIRES this
""",
    "max_turns": """
generator:
  max_turns: 5  # Adjust based on task complexity
""",
    "the fix of the refusal": """
generator:
  use_conversation_multi_turn: true
""",
    "the fix of memory": """
generator:
  gpu_memory_utilization: 0.7  # Lower to leave headroom
  max_num_seqs: 256            # Reduce concurrent sequences
""",
}


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("text", SETTINGS.values(), ids=SETTINGS)
def test_the_settings_of_the_guide_compose(text):
    settings = dict(flat(yaml.safe_load(text)))
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    cfg = compose([*words, "model=hf", "model.path=you/model", "trainer.optimizer.lr=1e-6"])
    for key, value in settings.items():
        assert OmegaConf.select(cfg, key) == value


def test_a_file_of_settings_is_an_experiment(tmp_path):
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\n" + SETTINGS["basic setup"])
    words = ["experiment=mine", "model=hf", "model.path=you/model", "trainer.optimizer.lr=1e-6"]
    assert compose(words, str(tmp_path)).generator.sampling_params.max_generate_length == 1024


def test_the_refusal_of_the_guide_has_the_same_text():
    with pytest.raises(NotImplementedError) as error:
        compose([*SQL, "generator.use_conversation_multi_turn=false"])
    assert str(error.value) == "`use_conversation_multi_turn=False` is not supported for SGLang backend"


def test_the_import_of_the_guide_works():
    """`tests/rollout/test_guide_environments.py` runs the environments of the guide."""
    from mtrl.environments.base import BaseEnvironment as ours
    from mtrl.environments.base_environment import BaseEnvironment

    assert BaseEnvironment is ours


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_the_pages_show_every_setting():
    lines = [*page("guide").splitlines(), *page("troubleshooting").splitlines()]
    written = {re.sub(r"\s*#.*", "", line).strip() for line in lines}
    for text in SETTINGS.values():
        for line in text.strip().splitlines():
            assert re.sub(r"\s*#.*", "", line).strip() in written


def test_the_pages_have_the_table_and_the_troubleshooting():
    table = page("guide").partition("## Quick reference")[2].partition("\n## ")[0]
    named = {name for name in re.findall(r"`([\w.]+)`", table) if "." in name and find(name)}
    four = {"max_turns", "backend", "use_conversation_multi_turn", "sampling_params.max_generate_length"}
    assert {f"generator.{name}" for name in four} <= named
    for trouble in ("Conversations do not continue", "Memory with many turns", "Rewards are inconsistent across turns"):
        assert f"**{trouble}.**" in page("troubleshooting")
