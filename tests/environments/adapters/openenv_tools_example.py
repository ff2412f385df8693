"""An OpenEnv environment with tools, and its server; the file is imported and run only if OpenEnv is installed."""

import sys

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Till(MCPEnvironment):
    """The price of three apples is asked; `pay` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("till")

        @server.tool
        def price(item: str) -> int:
            """The price of an item, in cents."""
            return {"apple": 30}[item]

        @server.tool
        def pay(cents: int) -> str:
            """Pay an amount, in cents."""
            return "thanks"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"seed": seed})

    def _finished(self, observation, action):
        if isinstance(action, CallToolAction) and observation.error is None:
            observation.metadata = {"asked": action.tool_name == "price"}
            if action.tool_name == "pay":
                observation.done, observation.reward = True, float(action.arguments["cents"] == 90)
        return observation

    def step(self, action, timeout_s=None, **kwargs):
        return self._finished(super().step(action, timeout_s, **kwargs), action)

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._finished(await super().step_async(action, timeout_s, **kwargs), action)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError(f"{action!r} is no call of a tool")

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    app = create_fastapi_app(Till, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
