"""The real mini-swe-agent, its code untouched, over LiteLLM: it repairs the repositories of `envs/mini_swe`.

    pip install 'mtrl[swe]'
    python -m mtrl.main experiment=mini_swe environment.target=examples.agents.mini_swe_agent.FAMILY \
        generator.agent.target=examples.agents.mini_swe_agent.run

`DefaultAgent` and `LitellmTextbasedModel` are the package's own; where commands run is our sandbox. Its prompts are
settings, as they are in its own configuration files: set here so that a tiny policy can read them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from envs import mini_swe
from envs.mini_swe.agent import AgentEnvironment
from envs.mini_swe.package import mini_swe_agent
from envs.mini_swe.sandbox_task import SandboxTask
from mtrl.environments.base import Resources
from mtrl.environments.family import Splits
from mtrl.types import Message, Row

# The package asks up to ten times, with pauses of 4 to 60 seconds. What the gateway refuses it refuses for good.
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
# LiteLLM would ask the internet for a list of prices when it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

OPENING: Message = {"role": "system", "content": "repair"}
"""The agent always begins with a system message, and the short rows have none."""


@dataclass(frozen=True)
class Settings:
    """What the package's own YAML files set."""

    step_limit: int
    observation_template: str
    format_error_template: str
    action_regex: str = r"(?m)^```(?:bash|mswea_bash_command)[ \t\r]*\n(.*?)\n```"


SHORT = Settings(
    step_limit=3,
    observation_template=(
        "{% if output.exception_info %}{{ output.exception_info }} ; {% endif %}{{ output.returncode }} ; "
        "{% set text = output.output | trim %}"
        "{% if text | length > 300 %}{{ text[:150] }} ... {{ text[-150:] }}{% else %}{{ text }}{% endif %}"
        " ; {{ step_limit - n_model_calls }} left"
    ),
    format_error_template="write one command",
)
"""In the words of the short rows, which the tiny policy's warm start has read."""
FULL = Settings(
    step_limit=20,
    observation_template=(
        "{% if output.exception_info %}<exception>{{ output.exception_info }}</exception>\n{% endif %}"
        "<returncode>{{ output.returncode }}</returncode>\n<output>\n"
        "{% if output.output | length > 10000 %}{{ output.output[:5000] }}\n...\n{{ output.output[-5000:] }}"
        "{% else %}{{ output.output }}{% endif %}</output>"
    ),
    format_error_template="Format error: {{ error }} Write exactly one command, in one block that begins with a line "
    "```bash and ends with a line ```.",
)


def run(row: Row, client: Any) -> dict[str, Any]:
    """One episode for `generator.agent.target`: 1.0 if what the agent submitted passes the row's hidden tests."""
    truth = row["ground_truth"]
    command_seconds, grading_seconds = truth.get("seconds", (30, 30))
    with Resources() as resources:
        task = SandboxTask(truth, resources, command_seconds, grading_seconds)
        agent = make_agent(row, client, task)
        system, issue = (message["content"] for message in row["prompt"])
        submitted = agent.run(issue, system=system)["exit_status"] == "Submitted"
        solved = submitted and task.solved()[0]
    return {"reward": float(solved), "metrics": {"submitted": float(submitted)}}


def make_agent(row: Row, client: Any, task: SandboxTask) -> Any:
    """The package's agent and model around the commands of `task`, with the gateway for an endpoint."""
    settings = SHORT if row.get("style") == "short" else FULL
    model = mini_swe_agent("models.litellm_textbased_model").LitellmTextbasedModel(
        model_name=f"openai/{client.model}",
        model_kwargs={"api_base": client.base_url, "api_key": client.api_key},
        cost_tracking="ignore_errors",  # nobody has a price for it
        action_regex=settings.action_regex,
        observation_template=settings.observation_template,
        format_error_template=settings.format_error_template,
    )
    return mini_swe_agent("agents.default").DefaultAgent(
        model,
        AgentEnvironment(task),
        system_template="{{ system }}",
        instance_template="{{ task }}",
        step_limit=settings.step_limit,
        cost_limit=0,
        max_consecutive_format_errors=0,
    )


def load(data: Any, seed: int, **config: Any) -> Splits:
    """The family's rows, with the two messages that the agent begins with."""
    splits = mini_swe.load(data, seed, **config)
    for row in (*splits.train, *splits.test):
        if row["prompt"][0]["role"] != "system":
            row["prompt"] = [OPENING, *row["prompt"]]
    return splits


FAMILY = replace(mini_swe.FAMILY, load=load)
"""The family, played by its environment or by the agent: the same rows, scored by the same scorer."""
