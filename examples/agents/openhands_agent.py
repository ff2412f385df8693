"""The agent of the OpenHands SDK, unchanged, with its terminal and its file editor: it repairs the repositories of
`envs/mini_swe`.

It needs Python 3.12 or newer and other versions of packages than mtrl, so it has an environment of its own::

    python3.12 -m venv openhands && openhands/bin/pip install 'openhands-sdk>=1.58,<2' 'openhands-tools>=1.58,<2'
    export MTRL_OPENHANDS_PYTHON=$PWD/openhands/bin/python
    mtrl train experiment=null environment=agent name=repair \
        environment.target=examples.agents.command_line.FAMILY model=qwen3_4b generator.max_turns=20 \
        generator.agent.target=examples.agents.openhands_agent.run

The agent runs commands that the policy writes, and therefore runs in the sandbox of the agents of the command line. Its
system prompt has 15,000 characters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.agents.command_line import issue, repair
from examples.agents.command_line_sandbox import inside
from examples.agents.own_interpreter import own_interpreter
from mtrl.types import Row

PROGRAM = Path(__file__).parent.absolute() / "openhands_program" / "mtrl_openhands.py"
VARIABLE = "MTRL_OPENHANDS_PYTHON"
INSTALL = (
    "python3.12 -m venv openhands && openhands/bin/pip install 'openhands-sdk>=1.58,<2' 'openhands-tools>=1.58,<2'"
)


async def run(row: Row, client: Any) -> dict[str, Any]:
    """Run one episode for `generator.agent.target`."""
    python = own_interpreter(VARIABLE, "the OpenHands SDK", INSTALL)
    folders = [python.parents[1], python.resolve().parents[1], PROGRAM.parent]
    variables = {
        "OPENAI_BASE_URL": inside(client.base_url),
        "OPENAI_API_KEY": client.api_key,
        "MTRL_MODEL": client.model,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # LiteLLM would wait for a download
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }
    return await repair(row, client, folders, [str(python), str(PROGRAM), issue(row)], variables)
