"""An environment of verifiers 0.2 or 0.3: the target is `load_environment`."""

import verifiers as vf
from datasets import Dataset


def exact(completion, answer):
    return float(completion[-1].content == answer)


class Words(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": f"It begins with {state['answer'][0]}."}]

    @vf.stop
    async def said_it(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1].content == state["answer"]


def load_environment(rounds: int = 3) -> vf.Environment:
    words = [{"question": "Which fruit?", "answer": word} for word in ("apple", "pear", "plum", "quince") * 4]
    return Words(dataset=Dataset.from_list(words), rubric=vf.Rubric(funcs=[exact]), max_turns=rounds)
