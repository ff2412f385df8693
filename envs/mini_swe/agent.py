"""Adapter of a task to the `env` that mini-swe-agent's own agents expect."""

from __future__ import annotations

import platform
from typing import Any

from envs.mini_swe.environment import Task, is_submission
from envs.mini_swe.package import mini_swe_agent


class AgentEnvironment:
    """mini-swe-agent's `Environment` protocol around a task, for its unmodified agents.

    Example::

        with Resources() as resources:
            task = SandboxTask(row["ground_truth"], resources)
            agent = DefaultAgent(model, AgentEnvironment(task), system_template=..., instance_template=...)
            agent.run(issue)
            solved, _ = task.solved()

    Args:
        task: a `SandboxTask` or a `ContainerTask`.
        variables: additional variables for prompt templates.
    """

    def __init__(self, task: Task, **variables: Any):
        self.task = task
        self.config = {"cwd": getattr(task, "cwd", "/workspace"), **variables}
        self._submitted = mini_swe_agent("exceptions").Submitted

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run `action["command"]`.

        Raises:
            Submitted: the command submitted the task; this exception ends the agent.
        """
        result = self.task.execute(action, cwd)
        if is_submission(result):
            submission = "".join(result["output"].lstrip().splitlines(keepends=True)[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise self._submitted({"role": "exit", "content": submission, "extra": extra})
        return result

    def get_template_vars(self, **variables: Any) -> dict[str, Any]:
        return {**self.config, **platform.uname()._asdict(), **variables}

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self.task).__module__}.{type(self.task).__name__}"
        return {"info": {"config": {"environment": self.config, "environment_type": kind}}}
