"""An environment of tinker-cookbook: `step` returns the whole conversation."""

from tinker_cookbook.rl.message_env import MessageEnv, MessageStepResult


class Quiz(MessageEnv):
    def __init__(self, question, answer):  # columns of the row
        self.messages = [{"role": "user", "content": question}]
        self.answer = answer

    async def initial_observation(self):
        return self.messages

    async def step(self, message):
        right = message["content"] == self.answer
        self.messages += [message, {"role": "user", "content": "Are you sure?"}]
        return MessageStepResult(reward=float(right), episode_done=right, next_messages=self.messages)
