"""The notebooks run from top to bottom, each in its own kernel."""

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs pip install 'mtrl-agents[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="needs pip install 'mtrl-agents[notebooks]'")
pytest.importorskip("ipykernel", reason="needs pip install 'mtrl-agents[notebooks]'")

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
FAST = {
    "debug": "fast", "preflight.at_start": "none", "diagnosis.live": "none", "evaluation.every_steps": 0,
    "model.warm_start.demonstrations": 8,
}  # fmt: skip
FORKED = """
import subprocess
from types import SimpleNamespace

from mtrl import api
from tests import forked

api.subprocess = SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
"""
"""Code that makes `mtrl.api` fork its processes from a server that has imported all modules, which saves time."""


def executed(name, folder, monkeypatch, settings, more=""):
    """Run all cells of a notebook in `folder`, with other `settings`, and with the code `more` after them."""
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    own = next(cell for cell in notebook.cells if "\nsettings = " in cell.source)
    own.source = f"import sys\n\nsettings = {settings!r}\n{more}"
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    return notebook


def shown(notebook):
    """Return the printed and returned text of all cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.slow
def test_local_training(tmp_path, monkeypatch):
    text = shown(executed("local_training.ipynb", tmp_path, monkeypatch, FAST, FORKED))
    assert "'steps': 2" in text and "mtrl.main" in text and "assistant" in text
    assert list(tmp_path.glob("outputs/gsm8k/*/summary.json"))
    assert list(tmp_path.glob("outputs/evaluations/*/report.html"))


@pytest.mark.slow
def test_custom_environment(tmp_path, monkeypatch):
    text = shown(executed("custom_environment.ipynb", tmp_path, monkeypatch, FAST))
    assert "472 -> (1.0, None, True)" in text
    assert "19 passed" in text and "'success_after'" in text
    assert list(tmp_path.glob("outputs/vault/*/summary.json"))


def test_notebooks_contain_no_outputs():
    """Outputs would depend on the machine, and every change would contain pictures."""
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells), path.name
