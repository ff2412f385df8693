"""An environment in TRL's form: its public methods are tools."""


class Counter:
    def reset(self, **row):
        self.value, self.goal = 0, int(row["answer"])
        return "\nStart at 0."

    def add(self, n: int) -> int:
        """Add to the counter.

        Args:
            n: How much.
        """
        self.value += n
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.goal)
