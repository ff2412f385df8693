"""The word problems of `experiment=gsm8k` as three kinds of agent programs: a function, a command and a server.

Each sends the policy the same messages as the environment, so that its run equals the run with the environment. Not a
test; `python gsm8k_agents.py` is the command, `python gsm8k_agents.py PORT` the server.
"""

import asyncio
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from envs.gsm8k.environment import Gsm8kEnv
from mtrl.agents.client import AgentClient

TURNS = 3


async def play(row, client):
    """Run one episode. Return the rewards of its turns and their number. The requested temperature has no effect."""
    environment, messages, rewards = Gsm8kEnv(TURNS, reward="guide", calculator=True), list(row["prompt"]), []
    environment.reset(row)
    while True:
        message = await client.achat(messages, temperature=0.25)
        result = environment.step(message["content"], row["ground_truth"])
        rewards.append(result.reward)
        if result.done:
            return {"reward": rewards, "metrics": {"moves": len(rewards)}}
        messages += [message, {"role": "user", "content": result.observation}]


def play_alone(row, base_url, api_key, model):
    """Run `play` without a running event loop."""

    async def one():
        client = AgentClient(base_url, api_key, model)
        try:
            return await play(row, client)
        finally:
            await client.close()

    return asyncio.run(one())


class Agent(BaseHTTPRequestHandler):
    """Server that runs an episode per `POST /rollout`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"status": "healthy"})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(
            play_alone(request["instance"], request["model_endpoint"], request["metadata"]["trajectory_id"], "default")
        )

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    if len(sys.argv) > 1:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Agent).serve_forever()
    row = json.loads(Path(os.environ["MTRL_ROW"]).read_text())
    outcome = play_alone(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["MTRL_MODEL"])
    Path(os.environ["MTRL_RESULT"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
