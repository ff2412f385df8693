"""The real mini-swe-agent, with unmodified code, over LiteLLM: it repairs the repositories of `envs/mini_swe`.

    pip install 'mtrl-agents[swe]'
    mtrl train experiment=mini_swe environment.target=examples.agents.mini_swe_agent.FAMILY \
        generator.agent.target=examples.agents.mini_swe_agent.run

`DefaultAgent` and `LitellmTextbasedModel` are the package's own; commands run in mtrl's sandbox. The prompts are
settings, as in the package's configuration files; here they are short enough for a tiny policy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from envs import mini_swe
from envs.mini_swe.agent import AgentEnvironment
from envs.mini_swe.package import mini_swe_agent
from envs.mini_swe.sandbox_task import SandboxTask
from mtrl.datasets import Splits
from mtrl.environments.base import Resources
from mtrl.types import Message, Row

# The package retries up to ten times, with pauses of 4 to 60 seconds, but the gateway's refusals are permanent.
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
# LiteLLM would download a list of prices at its import.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

OPENING: Message = {"role": "system", "content": "repair"}
"""System message for the short rows, which have none, because the agent always starts with one."""


@dataclass(frozen=True)
class Settings:
    """Settings that the package reads from its own YAML files."""

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
"""Settings with the texts of the short rows, which the tiny policy knows from its warm start."""
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
    """Run one episode for `generator.agent.target`; the reward is 1.0 if the submission passes the row's hidden
    tests."""
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
    """Create the package's agent and model, with the commands of `task` and the gateway as the endpoint."""
    settings = SHORT if row.get("style") == "short" else FULL
    model = mini_swe_agent("models.litellm_textbased_model").LitellmTextbasedModel(
        model_name=f"openai/{client.model}",
        model_kwargs={"api_base": client.base_url, "api_key": client.api_key},
        cost_tracking="ignore_errors",  # the policy has no price
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


def load(data: Any, seed: int, prompt: str = "short", **config: Any) -> Splits:
    """Load the family's rows, each with the two messages with which the agent starts."""
    splits = mini_swe.load(data, seed, prompt=prompt, **config)
    for row in (*splits.train, *splits.test):
        if row["prompt"][0]["role"] != "system":
            row["prompt"] = [OPENING, *row["prompt"]]
    return splits


FAMILY = replace(mini_swe.FAMILY, load=load)
"""The family for episodes of its environment or of the agent: the same rows and the same scorer."""
