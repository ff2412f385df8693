"""The program inside the sandbox of `openhands_agent.py`: one conversation of the OpenHands SDK with its own tools.

It runs in an interpreter of its own, and imports nothing of mtrl. The task is the first argument of the command line.
"""

from __future__ import annotations

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool


def main(task: str) -> None:
    """Let the agent work in the current folder until it calls its tool `finish`, or answers with text alone."""
    llm = LLM(
        model=f"openai/{os.environ['MTRL_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        num_retries=0,  # the gateway's refusals are permanent, and OpenHands would pause for minutes
    )
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
    conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
    try:
        conversation.send_message(task)
        conversation.run()
    finally:
        conversation.close()


if __name__ == "__main__":
    main(sys.argv[1])
