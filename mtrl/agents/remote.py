"""Agents that run already and receive a request for every episode: the managed service's protocol
(`sagemaker.train.rft`).

`POST {url}/rollout` begins an episode. The agent may answer with the reward when the episode is over, or answer at once
and later report to `metadata.endpoint` (`mtrl/gateway/feedback.py`). `GET {url}/health` answers 200 if the agent is
available.
"""

from __future__ import annotations

import math
import os
from typing import Any

import httpx

from mtrl.agents.runner import AgentError, Assignment, ProgramResult, as_outcome
from mtrl.engines.server.http import Http
from mtrl.engines.server.server_api import ServerError
from mtrl.errors import UserError
from mtrl.types import Row
from mtrl.utils.http_client import exception_message, printable

JOB_ARN = "arn:aws:sagemaker:us-west-2:000000000000:job/AgentRFT/mtrl"
"""Job ARN that agents of the service require in a request. mtrl does not use it."""
REGION = "us-west-2"
SECONDS_FOR_HEALTH = 10.0


class RemoteRunner:
    """Sends episodes to an agent, and ends none itself: an agent that takes too long finds its trajectory closed."""

    ends_by_report = True

    def __init__(self, url: str, api_key_env: str):
        """
        Args:
            url: address of the agent.
            api_key_env: name of the environment variable with the token for the agent; without a value no token is
                sent.

        Raises:
            UserError: the agent does not answer `GET /health` with status 200.
        """
        self.url, token = url.rstrip("/"), os.environ.get(api_key_env) or None
        self._http = Http(self.url, token)
        self._check_health(token)

    async def run(self, assignment: Assignment) -> ProgramResult | None:
        """See `AgentRunner`."""
        try:
            # The request needs no time limit, because the episode loop has one.
            answer = await self._http.request("POST", "/rollout", rollout_request(assignment), seconds=math.inf)
        except ServerError as error:
            raise AgentError(str(error)) from None
        outcome = (
            as_outcome(answer, f"POST {self.url}/rollout") if isinstance(answer, dict | list | float | int) else None
        )
        return None if outcome == ProgramResult() else outcome

    async def close(self) -> None:
        await self._http.close()

    def _check_health(self, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # The body is not read, because its length is unknown.
            with (
                httpx.Client(trust_env=False, timeout=SECONDS_FOR_HEALTH) as client,
                client.stream("GET", f"{self.url}/health", headers=headers) as answer,
            ):
                status = answer.status_code
            problem = None if status == 200 else f"HTTP {status}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            problem = printable(exception_message(error), token)
        if problem:
            raise UserError(
                f"generator.agent.url={self.url}: the agent does not answer GET /health ({problem}); start it first, "
                "or correct the address"
            )


def rollout_request(assignment: Assignment) -> dict[str, Any]:
    """Return the body of `POST /rollout`, in both forms that agents of the service read: the form of the SDK's
    `RolloutRequest`, and the form of its Lambda events, with a text for a prompt and keys in camelCase.

    The trajectory's id in the body is its token, so that an agent that passes only the id on can use it as its API key.
    """
    name = assignment.api_key
    sampling = {"temperature": assignment.temperature, "max_tokens": assignment.max_tokens, "top_p": assignment.top_p}
    return {
        "instance": assignment.row,
        "prompt": _text(assignment.row),
        "metadata": {
            "job_arn": JOB_ARN,
            "jobArn": JOB_ARN,
            "trajectory_id": name,
            "trajectoryId": name,
            "rolloutId": name,
            "endpoint": assignment.feedback_url,
            "region": REGION,
        },
        "inference_params": sampling,
        "inferenceParams": {
            "temperature": assignment.temperature,
            "maxTokens": assignment.max_tokens,
            "topP": assignment.top_p,
        },
        "model_name": assignment.model,
        "model_endpoint": assignment.base_url,
    }


def _text(row: Row) -> str:
    """Return the text of the user messages in the row's prompt."""
    return "\n\n".join(str(message.get("content") or "") for message in row["prompt"] if message.get("role") == "user")
