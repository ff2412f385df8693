"""An environment of verifiers for the tests: numbers to double, with one tool, and one setting per kind of failure."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Config(vf.TasksetConfig):
    split: str = "train"
    fault: str = ""


class ToolConfig(vf.SharedToolsetConfig):
    pass


class Calculator(vf.Toolset[ToolConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def double(self, n: int) -> str:
        """Twice a number."""
        return str(2 * n)


class Word(vf.Task[Data]):
    @vf.reward(weight=0.75)
    async def right(self, trace) -> float:
        if trace.last_reply == "nan":
            return float("nan")
        if trace.last_reply == "text":
            return "no number"
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def turns(self, trace) -> float:
        if trace.last_reply == "metric":
            return "many"
        return float(trace.num_turns)


class Words(vf.Taskset[Word, Config]):
    def load(self):
        if self.config.fault == "download":
            raise ConnectionError("cannot reach the hub")
        first = {"train": 0, "test": 14}[self.config.split]
        for n in range(first, first + 16):
            yield Word(Data(prompt=f"double {n}", system_prompt="count", answer=str(2 * n)), self.config.task)

    @property
    def bounded(self):
        return self.config.fault != "endless"

    @classmethod
    def toolsets(cls, config):
        return [Calculator(ToolConfig())]


__all__ = ["Words"]

if __name__ == "__main__":
    Calculator.run()
