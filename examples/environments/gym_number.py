"""An environment of Gymnasium: the seed comes from the row."""

import gymnasium
from gymnasium.spaces import Discrete, Text


class Number(gymnasium.Env):
    def __init__(self, highest=9):
        self.action_space, self.observation_space = Discrete(highest + 1), Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # the row's seed
        self.number = self.np_random.integers(self.action_space.n)
        return "Guess my number.", {}

    def step(self, action):
        right = action == self.number
        return "right" if right else "higher" if action < self.number else "lower", float(right), right, False, {}
