"""mini-swe-agent's own agent, with unmodified code, in mtrl's sandbox."""

import pytest

from envs.mini_swe import FAMILY
from envs.mini_swe.agent import AgentEnvironment
from envs.mini_swe.package import mini_swe_agent
from envs.mini_swe.sandbox_task import SandboxTask
from mtrl.environments.base import Resources


def agent_of(task, commands):
    models = mini_swe_agent("models.test_models")
    outputs = [models.make_output(f"run {command}", [{"command": command}]) for command in commands]
    model = models.DeterministicModel(outputs=outputs)
    default_agent = mini_swe_agent("agents.default").DefaultAgent
    templates = {"system_template": "You repair software on {{system}}.", "instance_template": "{{task}} in {{cwd}}"}
    return default_agent(model, AgentEnvironment(task), **templates, step_limit=6, cost_limit=100.0)


def commands_of(row):
    return [response.removeprefix("```bash\n").removesuffix("\n```") for response in FAMILY.gold(row)]


def test_the_packages_agent_solves_a_generated_row(splits):
    row = splits.train[5]
    with Resources() as resources:
        task = SandboxTask(row["ground_truth"], resources)
        agent = agent_of(task, commands_of(row))
        result = agent.run(row["prompt"][0]["content"])
        assert result == {"exit_status": "Submitted", "submission": ""}
        assert task.solved() == (True, "")
    assert agent.messages[-1]["role"] == "exit"
    seen = agent.messages[3]["content"]
    assert seen == f"<returncode>0</returncode>\n<output>\n{row['ground_truth']['files']['f.py']}</output>"
    assert agent.serialize()["info"]["config"]["environment_type"] == "envs.mini_swe.sandbox_task.SandboxTask"


def test_the_submission_is_the_output_after_the_marker(make_row, submit):
    with Resources() as resources:
        task = SandboxTask(make_row()["ground_truth"], resources)
        result = agent_of(task, [f"{submit} && cat f.py"]).run("x")
        assert result["submission"] == "def add(a, b): return a - b\n"
        assert task.solved() == (False, "")


def test_a_protocol_of_the_package(make_row, submit):
    """Results have the package's keys, and a submission raises the exception that ends its agents."""
    with Resources() as resources:
        environment = AgentEnvironment(SandboxTask(make_row()["ground_truth"], resources))
        local = mini_swe_agent("environments.local").LocalEnvironment(cwd="/")
        for command in ("pwd >&2; exit 3", "echo out; echo err >&2; echo out"):
            ours, theirs = environment.execute({"command": command}, cwd="/"), local.execute({"command": command})
            assert ours == theirs
        assert environment.execute({"command": "pwd"})["output"] == "/workspace\n"
        assert environment.execute({"command": "pwd"}, cwd="/nowhere")["returncode"] == 1
        submitted = mini_swe_agent("exceptions").Submitted
        messages = []
        for each in (environment, local):
            with pytest.raises(submitted) as raised:
                each.execute({"command": f"{submit}; echo more"})
            messages.append(raised.value.messages)
        assert messages[0] == messages[1]
