"""Generated runs, and readers of the content of figures."""

from mtrl.record.run import Run
from mtrl.types import FinishReason, StopReason, Trajectory, Turn

SETTINGS = {
    "name": "made_up",
    "environment.name": "gsm8k",
    "algorithm.advantage_method": "grpo",
    "trainer.max_steps": 4,
    "generator.max_turns": 3,
}


def turn(tokens=2, reward=0.0, seen=3, components=None, metrics=None, advantages=(), message=None, broken=None):
    return Turn(
        observation_ids=[1] * seen,
        action_ids=[2] * tokens,
        action_logprobs=[-0.5] * tokens,
        version_spans=[(0, tokens)],
        finish=FinishReason.STOP,
        text="",
        message=message or {"role": "assistant", "content": ""},
        reward=reward,
        components=components or {},
        metrics=metrics or {},
        break_reason=broken,
        advantages=list(advantages),
    )


def trajectory(turns, score=1.0, stop=StopReason.DONE):
    return Trajectory("task", "group", 0, list(turns), stop, score=score)


def row(step, **values):
    """Return a row of metrics; the keyword `a__b` stands for `a/b`."""
    return {"step": step, **{key.replace("__", "/"): value for key, value in values.items()}}


class MadeUpRun(Run):
    """A run without a folder, with given settings and rows."""

    def __init__(self, path="run", settings=None, rows=()):
        super().__init__(path)
        self._given = settings or {}, list(rows)

    @property
    def settings(self):
        return self._given[0]

    @property
    def rows(self):
        return self._given[1]


def training_rows(steps=4, lift=0.0):
    """Return rows with rewards of `lift` + 0.1, `lift` + 0.2, …, and evaluations before the first and after the last
    step."""
    rows = [
        row(
            step,
            rollout__reward__mean=step / 10 + lift,
            rollout__success__mean=step / 10,
            rollout__turns__mean=2.0,
            rollout__stop__done=0.75,
            rollout__stop__max_turns=0.25,
            rollout__components__correct=step / 10,
            rollout__tokens__trajectory_mean=5.0,
            analysis__zero_adv_frac=0.5,
            perf__tokens_per_second=100.0,
            time__step=2.0,
        )
        for step in range(1, steps + 1)
    ]
    success = {"ci_low": 0.1, "mean": 0.2, "ci_high": 0.4}
    held_out = {f"val/success/{name}": value + lift for name, value in success.items()}
    rows[-1] |= held_out
    return [{"step": 0, **held_out}, *rows]


def panels_of(figure):
    """Return the panels of a figure, by title."""
    return {axes.get_title(loc="left").strip(): axes for axes in figure.axes}


def lines_of(axes):
    """Return (x, y) of the lines that a legend would name, by label."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def legend_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]
