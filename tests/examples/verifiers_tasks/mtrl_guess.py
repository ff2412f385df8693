"""An environment of verifiers for the tests, whose own loop answers `higher` until the number is right."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Guess(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        return [Guess(Data(prompt=f"which of {n}?", answer=str(n)), self.config.task) for n in range(8)]


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)
    rival: vf.AgentConfig = vf.AgentConfig(client=vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1"))


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            guess = await player.turn()
            while not guess.terminated and guess.last_reply != task.data.answer:
                guess = await player.turn("higher")


__all__ = ["GuessEnv", "Guesses"]
