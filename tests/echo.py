"""A toy task family: the answer is the digit that the question asks for."""

from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family


class Echo(BaseEnvironment):
    """An environment that ends when the response contains the digit, and counts its `close` calls."""

    closed = 0

    def step(self, response, ground_truth):
        right = ground_truth["digit"] in response
        return float(right), None if right else "no, again", right

    def close(self):
        Echo.closed += 1


class Demonstrator:
    """A demonstrator that is right in the second turn."""

    def __init__(self, row, rng):
        self.digit, self.wrong, self.observations = row["ground_truth"]["digit"], str(rng.randrange(10)), []

    def act(self, observation):
        self.observations.append(observation)
        return f"<say>{self.digit if len(self.observations) > 1 else self.wrong}</say>"


def rows(split, count):
    return [
        {
            "id": f"{split}-{i}",
            "prompt": [{"role": "user", "content": f"{split} wants {i % 10}, number {i}"}],
            "ground_truth": {"digit": str(i % 10)},
        }
        for i in range(count)
    ]


def echo_family():
    return Family(
        name="echo",
        environment=Echo,
        load=lambda data, seed: None,
        score=lambda trajectory, row: trajectory.reward,
        demonstrate=Demonstrator,
        tokens=("<say>", "</say>"),
    )
