"""An agent written for the managed service (SageMaker AI multi-turn RL), with its SDK: word problems with a calculator.

The agent follows the service's documentation and contains no code for mtrl: the SDK's decorator reports completion and
reward. It runs in an environment with the SDK, and mtrl may run elsewhere::

    pip install 'mtrl-agents[sagemaker]'
    AWS_ACCESS_KEY_ID=none AWS_SECRET_ACCESS_KEY=none uvicorn --port 8080 examples.agents.rft_agent:app
    mtrl train experiment=agent_word_problems generator.agent.target=null generator.agent.url=http://127.0.0.1:8080

The SDK signs a token before each report, so it needs credentials. AWS is never contacted, so any credentials work.
"""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI
from openai import OpenAI

from examples.agents.openai_tools import reward, solve

try:
    from sagemaker.core.token_generator import generate_token
    from sagemaker.train.rft import make_inference_headers, sagemaker_rft_handler
except ImportError as error:
    raise SystemExit("sagemaker is not installed; install it with: pip install 'mtrl-agents[sagemaker]'") from error

app = FastAPI()


@app.post("/rollout")
def rollout(payload: dict[str, Any]) -> dict[str, str]:
    handle_rollout(payload)
    return {"status": "accepted"}


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "healthy"}


@sagemaker_rft_handler
def handle_rollout(payload: dict[str, Any]) -> dict[str, float]:
    """Run one rollout; the decorator reports the returned value, or the failure."""
    metadata, row = payload["metadata"], payload["instance"]
    endpoint = metadata.get("endpoint") or os.environ["RFT_RUNTIME_ENDPOINT"]
    with OpenAI(
        base_url=endpoint + "/v1",
        api_key=generate_token(region=os.environ.get("AWS_REGION", "us-west-2")),
        default_headers=make_inference_headers(metadata),
    ) as openai:
        answer = solve(openai, "default", row["prompt"])
    return {"reward": reward(answer, row["ground_truth"]["answer"])}
