"""verifiers environments in the episode loop, on the package itself: its rubrics and messages cannot be copied."""

import asyncio
import signal

import pytest
from foreign import observed, real

from mtrl.config.schema import DataConfig
from mtrl.environments.adapters import adapt
from mtrl.environments.family import family_of_class
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from mtrl.types import StopReason

vf = real("verifiers", "verifiers")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("this verifiers has no MultiTurnEnv: pip install 'mtrl-agents[verifiers]'", allow_module_level=True)

from datasets import Dataset  # noqa: E402

TASKS = [{"question": f"{n} + 1?", "answer": str(n + 1), "info": {"n": n}} for n in range(16)]


def right(completion, answer, **kwargs):
    return float(answer in completion[-1].content)


async def turns(state, info):
    return len(state["trajectory"]) + info["n"] * 0


class Hints(vf.MultiTurnEnv):
    """Answers `higher` until the response is right; the second turn has a reward of 0.25."""

    def __init__(self, max_turns=4, **keywords):
        rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.1])
        keywords = {"dataset": Dataset.from_list(TASKS), **keywords}
        super().__init__(max_turns=max_turns, system_prompt="S", rubric=rubric, **keywords)
        self.cleaned = []

    async def setup_state(self, state):
        state["asked"] = 0
        return state

    async def add_trajectory_step(self, state, trajectory_step):
        trajectory_step["reward"] = 0.25 if len(state["trajectory"]) == 1 else None
        await super().add_trajectory_step(state, trajectory_step)

    async def env_response(self, messages, state, **kwargs):
        state["asked"] += 1
        if messages[-1].content == "fail":
            raise vf.Error("inside the environment")
        if messages[-1].content == "enough":
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"higher {state['asked']}"}]

    @vf.stop
    async def solved(self, state):
        trajectory = state["trajectory"]
        return bool(trajectory) and trajectory[-1]["completion"][-1].content == state["answer"]

    @vf.cleanup
    async def clean(self, state):
        self.cleaned.append(state["asked"])


@pytest.fixture
def hints():
    return adapt(Hints)


@pytest.fixture
def task(hints):
    return hints.load(DataConfig()).train[0]


def test_turns_rubric_and_cleanup(play, hints, task):
    trajectory = play(hints, ["no", "no", task["answer"]], task)
    assert trajectory.error is None
    assert observed(trajectory) == [["S", task["question"]], ["higher 1"], ["higher 2"], []]
    assert trajectory.rewards == pytest.approx([0.0, 0.25, 1.0 + 0.3])
    last = trajectory.turns[-1]
    assert last.components == {"right": 1.0, "turns": 3.0, "num_turns": 3.0}
    assert (last.metrics["rubric"], last.metrics["rubric_passed"]) == (pytest.approx(1.3), 1.0)
    assert trajectory.stop_reason == StopReason.DONE
    assert hints.shared.cleaned == [2]


def test_rewards_equal_those_of_the_rollout_of_verifiers(play, hints, task):
    """The same responses are run by the loop of verifiers and scored by its rubric."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    answers = ["no", "never", task["answer"]]
    ours = play(hints, answers, task)
    replies = iter(answers)

    async def reply(self, *arguments, **keywords):
        message = ResponseMessage(content=next(replies), finish_reason="stop", is_truncated=False)
        return Response(id="x", created=0, model="m", message=message)

    client = type("Fixed", (Client,), {**dict.fromkeys(Client.__abstractmethods__), "get_response": reply})(None)
    env = hints.shared

    async def theirs():
        state = await env.rollout({**task, "example_id": 0}, client, "m", {})
        await env.rubric.score_rollout(state)
        return state

    state = asyncio.run(theirs())
    assert state["reward"] == pytest.approx(ours.turns[-1].metrics["rubric"])
    assert state["metrics"] == ours.turns[-1].components
    contents = [message.content for message in (*state["prompt"], *state["completion"])]
    assert contents == [message["content"] for message in ours.messages]


def test_the_score_depends_on_the_rubric_not_on_the_reward(play, hints, task):
    family = family_of_class(hints)
    good, bad = (play(hints, [answer] * 4, task) for answer in (task["answer"], "no"))
    for turn in (*good.turns, *bad.turns):
        turn.reward = 7.0
    assert (family.score(good, task), family.score(bad, task)) == (1.0, 0.0)


def test_limits_of_either_side_are_truncation_and_are_scored(play, task):
    for max_turns, theirs in ((2, 4), (4, 2)):
        cls = adapt(Hints)
        cls.shared = Hints(max_turns=theirs)
        trajectory = play(cls, ["no"] * 4, task, max_turns=max_turns)
        assert len(trajectory.turns) == 2 and trajectory.stop_reason == StopReason.MAX_TURNS
        assert trajectory.rewards == pytest.approx([0.0, 0.25 + 0.2])


def test_an_episode_at_the_context_limit_is_scored(play, hints, task):
    trajectory = play(hints, ["no " * 60] * 4, task, max_context_length=150)
    assert (len(trajectory.turns), trajectory.stop_reason) == (1, StopReason.CONTEXT_LIMIT)
    assert trajectory.rewards == pytest.approx([0.1])
    last = trajectory.turns[-1]
    assert last.components == {"right": 0.0, "turns": 1.0, "num_turns": 1.0}
    assert last.metrics == {"rubric": pytest.approx(0.1), "rubric_passed": 0.0} and hints.shared.cleaned == [1]
    assert trajectory.error is None


def test_a_final_response_ends_the_episode(play, hints, task):
    trajectory = play(hints, ["enough"], task)
    assert trajectory.stop_reason == StopReason.DONE and observed(trajectory)[-1] == ["over"]
    assert trajectory.rewards == pytest.approx([0.1])


def test_an_error_fails_the_episode_and_cleans_up(play, hints, task):
    trajectory = play(hints, ["fail"], task)
    assert trajectory.stop_reason == StopReason.ENV_ERROR and "inside the environment" in trajectory.error
    assert hints.shared.cleaned == [1]
    assert play(hints, [task["answer"]], task).stop_reason == StopReason.DONE


def test_signal_handlers_are_restored():
    def mine(number, frame): ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        adapt(Hints)()
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_environment_must_be_made_on_the_main_thread(play, task):
    """Episodes start on threads, where verifiers cannot set its handlers."""
    trajectory = play(adapt(Hints), ["no"], task)
    assert "verifiers can make environments on the main thread alone" in trajectory.error


def test_without_an_evaluation_set_rows_are_held_out(hints):
    splits = hints.load(DataConfig())
    prompts = [str(row["prompt"]) for row in (*splits.train, *splits.test)]
    assert (len(splits.train), len(splits.test), len(set(prompts))) == (14, 2, 16)
    assert splits.train[0]["info"] == {"n": 1} and splits.train[0]["ground_truth"] == {"answer": "2"}


def test_evaluation_rows_are_removed_from_the_training_rows():
    cls = adapt(Hints)
    cls.shared = Hints(eval_dataset=Dataset.from_list(TASKS[:4]))
    splits = cls.load(DataConfig())
    assert (len(splits.train), len(splits.test)) == (12, 4)


def test_rows_of_a_path_get_the_system_prompt(play, hints, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(8)))
    row = hints.load(DataConfig(path=str(path))).train[0]
    trajectory = play(hints, ["1"], row)
    assert trajectory.error is None and observed(trajectory)[0] == ["S", "1?"]


def times(a: int, b: int) -> int:
    """Multiply."""
    return a * b


def load_environment(level: int = 1) -> vf.Environment:
    """Load an environment like the function of an environment package."""
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(tools=[times], max_turns=5, dataset=Dataset.from_list(TASKS), rubric=rubric)


def test_tools_and_load_environment(play):
    cls = adapt(load_environment)
    row = cls.load(DataConfig(), level=2).train[0]
    calls = [format_call("times", {"a": 1, "b": int(row["answer"])}), format_call("times", {"a": "x"}), row["answer"]]
    trajectory = play(cls, calls, row, level=2)
    assert trajectory.error is None
    assert cls.shared.tool_map.keys() == {"times"} and len(trajectory.turns) == 3
    assert observed(trajectory)[1] == [row["answer"]] and "missing" in observed(trajectory)[2][0]
    assert trajectory.rewards == [0.0, 0.0, 1.0]
    assert trajectory.turns[-1].components["times_calls"] == 2.0


def test_a_rubric_over_groups_is_refused():
    def best(completions) -> list[float]:
        return [0.0 for _ in completions]

    def make() -> vf.Environment:
        return vf.SingleTurnEnv(dataset=Dataset.from_list(TASKS), rubric=vf.Rubric(funcs=[best]))

    with pytest.raises(UserError, match="compares the rollouts of a group"):
        adapt(make)()
