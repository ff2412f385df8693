"""The guide, the policies and the notebook agree with the code."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mtrl.sagemaker import job, managed, service
from tests.sagemaker.offers import sdk

pytest.importorskip("botocore", reason="needs pip install 'mtrl-agents[sagemaker]'")

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("python scripts/launch")
]
POLICIES = sorted((ROOT / "examples" / "sagemaker").glob("*.json"))
NOTEBOOK = ROOT / "examples" / "notebooks" / "launch_training_job.ipynb"


@pytest.mark.parametrize("words", COMMANDS, ids=[f"command-{number}" for number in range(len(COMMANDS))])
def test_the_commands_of_the_guide_are_planned(words):
    plan = job.plan if words[1].endswith("launch_sagemaker.py") else managed.plan
    assert plan(words[2:]).settings.dry_run


def test_the_keys_of_the_guide_exist():
    known = {"sagemaker": job.JobConfig(), "managed": managed.ManagedConfig()}
    named = set(re.findall(r"`(sagemaker|managed)\.(\w+)", GUIDE)) - {("sagemaker", "serve")}
    assert len(named) > 20
    assert not [f"{section}.{key}" for section, key in named if not hasattr(known[section], key)]


@pytest.mark.parametrize("path", POLICIES, ids=[path.stem for path in POLICIES])
def test_policies_name_operations_that_there_are(path):
    statements = json.loads(path.read_text(encoding="utf-8"))["Statement"]
    assert {"trust", "execution_role", "caller"} == {path.stem for path in POLICIES}
    actions = [action for entry in statements for action in [entry["Action"]] if isinstance(action, str)]
    actions += [action for entry in statements if isinstance(entry["Action"], list) for action in entry["Action"]]
    assert all(entry["Effect"] == "Allow" and ("Resource" in entry or "Principal" in entry) for entry in statements)
    for action in actions:
        prefix, _, operation = action.partition(":")
        assert (operation and operation != "*") or prefix == "sagemaker-mlflow", action
        if prefix == "sagemaker":
            assert operation in service.model().operation_names, action


def test_the_notebook_runs(capsys):
    sdk()
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert names["request"]["TrainingJobName"].startswith("mtrl-text-to-sql-")
    assert names["spot_request"]["EnableManagedSpotTraining"] is True
    assert names["START"] is False
    assert "did you mean ml.p5.48xlarge?" in capsys.readouterr().out
