"""OpenEnv environments in the episode loop: on a copy of its interface, and on the package where it is installed."""

from types import SimpleNamespace
from typing import ClassVar

import openenv_copy
import pytest
from foreign import observed, real
from pydantic import Field

from mtrl.environments.adapters import adapt
from mtrl.environments.adapters.openenv import action_class
from mtrl.types import StopReason


@pytest.fixture(params=["copy", "real"])
def openenv(request):
    """`Environment`, `EnvClient`, `Action`, `Observation`, `StepResult`."""
    if request.param == "copy":
        return openenv_copy
    core = real("openenv.core", "openenv")
    from openenv.core.client_types import StepResult
    from openenv.core.env_server.types import Action, Observation

    names = {"Action": Action, "Observation": Observation, "StepResult": StepResult}
    return SimpleNamespace(Environment=core.Environment, EnvClient=core.EnvClient, **names)


@pytest.fixture
def echo(openenv):
    """An environment that echoes, like the template of OpenEnv, and counts its steps."""

    class EchoAction(openenv.Action):
        message: str

    class EchoObservation(openenv.Observation):
        echoed: str = ""

    class Echo(openenv.Environment):
        made: ClassVar[list] = []

        def __init__(self, greeting="hello"):
            super().__init__()
            self.greeting, self.steps, self.closed = greeting, 0, 0
            Echo.made.append(self)

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.seed, self.given = seed, kwargs
            return EchoObservation(echoed=f"{self.greeting} {seed}")

        def step(self, action: EchoAction, timeout_s=None, **kwargs) -> EchoObservation:
            self.steps += 1
            reward = [None, True, 0.25][self.steps - 1]
            metadata = {"length": len(action.message), "text": "no metric"}
            return EchoObservation(echoed=action.message, reward=reward, done=self.steps == 3, metadata=metadata)

        @property
        def state(self):
            return None

        def close(self):
            self.closed += 1

    return Echo


def test_reward_and_end_come_from_the_observation(play, echo, row):
    row = {**row, "seed": 5, "reset": {"split": "train", "index": 3}}
    trajectory = play(adapt(echo), ["a", "<b>", "ccc"], row, greeting="hi")
    assert trajectory.error is None
    assert trajectory.rewards == [0.0, 1.0, 0.25] and trajectory.stop_reason == StopReason.DONE
    assert observed(trajectory) == [["Q\n\nhi 5"], ["a"], ["<b>"], ["ccc"]]
    assert [turn.metrics["length"] for turn in trajectory.turns] == [1.0, 3.0, 3.0]
    (env,) = echo.made
    assert (env.seed, env.given, env.closed) == (5, {"split": "train", "index": 3}, 1)


def test_an_action_of_several_fields_is_json(openenv, row):
    class Move(openenv.Action):
        x: int
        y: int = 0

    class Board(openenv.Observation):
        at: list[int] = Field(default_factory=list)
        text: str = ""

    class Walk(openenv.Environment[Move, Board, openenv_copy.State]):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Board(at=[0, 0])

        def step(self, action, timeout_s=None, **kwargs):
            return Board(at=[action.x, action.y], reward=1.0)

        @property
        def state(self):
            return None

    assert action_class(Walk) is Move
    env = adapt(Walk)()
    assert env.reset(row)[-1]["content"] == 'Q\n\n{"at": [0, 0], "text": ""}'
    assert env.step('go <action>{"x": 2}</action>', {}).observation == '{"at": [2, 0], "text": ""}'
    bad = ["go", '{"x": "two"}', "{}", '{"x": 1, "z": 1}', "[1]", '{"x": 1, "metadata": {"a": 1}}', '{"x": 1, "x": 2}']
    for response in bad:
        result = env.step(response, {})
        assert result.observation.startswith("Invalid action: ") and result.metrics == {"invalid_action": 1.0}, response


def test_a_client_is_used_through_its_blocking_wrapper(play, openenv, row):
    calls = []

    class Blocking:
        def reset(self, **kwargs):
            calls.append(("reset", kwargs))
            return openenv.StepResult(observation={"prompt": "guess"})

        def step(self, action, **kwargs):
            calls.append(("step", action))
            return openenv.StepResult(observation={"prompt": "right", "n": 1}, reward=1.0, done=True)

        def close(self):
            calls.append("close")

    class Client(openenv.EnvClient):
        def __init__(self, base_url):
            calls.append(base_url)

        def sync(self):
            return Blocking()

        _step_payload = _parse_result = _parse_state = None

    trajectory = play(adapt(Client), ['{"guess": 3}'], {**row, "seed": 1}, base_url="http://127.0.0.1:1")
    assert (trajectory.error, trajectory.rewards) == (None, [1.0])
    assert observed(trajectory) == [["Q\n\nguess"], ['{"prompt": "right", "n": 1}']]
    assert calls == ["http://127.0.0.1:1", ("reset", {"seed": 1}), ("step", {"guess": 3}), "close"]


def test_an_action_that_a_server_refuses_is_invalid_and_other_errors_fail_the_episode(play, row):
    """The texts are those of OpenEnv 0.10; `test_adapter_openenv_real.py` has the real server."""

    class Blocking:
        def reset(self, **kwargs):
            return openenv_copy.StepResult(observation={"prompt": "guess"})

        def step(self, action, **kwargs):
            code = "VALIDATION_ERROR" if "guess" not in action else "EXECUTION_ERROR"
            raise RuntimeError(f"Server error: (code: VALIDATION_ERROR) as the model wrote it (code: {code})")

    class Client(openenv_copy.EnvClient):
        def sync(self):
            return Blocking()

    trajectory = play(adapt(Client), ['{"word": 1}', '{"guess": 1}'], row)
    assert trajectory.turns[0].metrics["invalid_action"] == 1.0
    assert observed(trajectory)[1] == ["Invalid action: write a JSON object with the fields of the action"]
    assert trajectory.stop_reason == StopReason.ENV_ERROR and "EXECUTION_ERROR" in trajectory.error


def test_a_real_server_and_its_generic_client(play, row):
    """The client uses a socket, as in training against a container."""
    real("openenv.core", "openenv")
    import socket
    import threading
    import time

    import uvicorn
    from openenv.core import GenericEnvClient
    from openenv.core.env_server import create_fastapi_app
    from openenv_server_example import Guess, GuessAction, GuessObservation

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Guess, GuessAction, GuessObservation)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.05)
        trajectory = play(
            adapt(GenericEnvClient), ['{"word": "no"}', '{"word": "yes"}'], row, base_url=f"http://127.0.0.1:{port}"
        )
    finally:
        server.should_exit = True
        thread.join(20)
    assert (trajectory.error, trajectory.rewards, trajectory.stop_reason) == (None, [0.0, 1.0], StopReason.DONE)
    assert observed(trajectory) == [["Q\n\nyes or no?"], ["wrong"], ["right"]]


def test_an_error_fails_the_episode_and_closes_the_environment(play, echo, monkeypatch):
    def broken(self, action, timeout_s=None):
        raise ConnectionError("the server is unreachable")

    monkeypatch.setattr(echo, "step", broken)
    trajectory = play(adapt(echo), ['{"message": "a"}'])
    assert trajectory.stop_reason == StopReason.ENV_ERROR and "the server is unreachable" in trajectory.error
    assert [env.closed for env in echo.made] == [1]
