"""An environment of SkyRL-Gym: the columns of the row are `extras`."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Multiply(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.answer = extras["reward_spec"]["ground_truth"]  # a column of the row
        self.max_turns = extras["max_turns"]  # generator.max_turns

    def step(self, action):
        self.turns += 1
        right = action.strip() == self.answer
        again = [{"role": "user", "content": "Not yet. Try again."}]
        done = right or self.turns >= self.max_turns
        observations = [] if done else again
        return BaseTextEnvStepOutput(observations=observations, reward=float(right), done=done, metadata={})
