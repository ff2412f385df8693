"""A generated run with all content that the page can show: disagreements, cut turns, hostile text, drift, alarms."""

import json

from mtrl.record.trajectories import write_groups
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests.view.made_runs import make_trajectory

USER, ASSISTANT, END = 256, 257, 258
HOSTILE = (
    "<img src=x onerror=\"window.pwned='img'\"> <script>window.pwned='script'</script> </script> "
    "<svg onload=\"window.pwned='svg'\"> [a](javascript:window.pwned='link') \u202egnp.exe \x1b[31m \u200bzero é🤖"
)
SIZE = 4
TASKS = ("apples", "pears", "plums")


def write_tokenizer(folder):
    """Write a tokenizer with bytes as tokens and three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|user|>", "<|assistant|>", "<|end|>")])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def token_turn(tokenizer, observed, text, step, reward=0.0, advantage=None, **more):
    """Return a turn whose ids are those of its texts."""
    action = [*tokenizer.encode(text).ids, END]
    logprobs = [-0.01 - 0.5 * (place % 7) for place in range(len(action))]
    values = {
        "observation_ids": [USER, *tokenizer.encode(observed).ids, END, ASSISTANT],
        "action_ids": action,
        "action_logprobs": logprobs,
        "version_spans": [(step, len(action))],
        "finish": FinishReason.STOP,
        "text": text,
        "message": {"role": "assistant", "content": text},
        "observation": [{"role": "user", "content": observed}],
        "reward": reward,
        "components": {"right": reward, "form": 0.0},
        "metrics": {"calls": 1.0},
        "seconds_generate": 0.25,
        "seconds_environment": 0.01,
        "advantages": [] if advantage is None else [advantage],
        "trainer_logprobs": [] if advantage is None else [x + 10.0 ** -(place % 6) for place, x in enumerate(logprobs)],
    }
    return Turn(**{**values, **more})


def episode(tokenizer, step, task, group, index, reward=1.0, score=1.0, advantage=None, text="the answer is 7"):
    turns = [
        token_turn(tokenizer, f"count the {task}", f"I look at the {task}\nand think", step, 0.0, advantage),
        token_turn(tokenizer, "you see 7", text, step, reward, advantage),
    ]
    return Trajectory(task, group, index, turns, StopReason.DONE, score=score)


def train_groups(tokenizer, step):
    """Return three groups. In each, trajectory 1 has a lenient reward, 2 a strict one, and 3 ends at a limit."""
    groups = []
    for place, task in enumerate(TASKS):
        name = f"step{step - 1}/{place}"
        of = [episode(tokenizer, step, task, name, index, advantage=0.5) for index in range(SIZE)]
        if step == 2:
            of[1] = episode(tokenizer, step, task, name, 1, reward=1.0, score=0.0, advantage=0.75, text="hacked")
        of[2] = episode(tokenizer, step, task, name, 2, reward=0.25, score=1.0, advantage=-0.5, text="strictly")
        of[3] = episode(tokenizer, step, task, name, 3, reward=0.0, score=0.0, advantage=-0.75, text="no idea")
        of[3].stop_reason = StopReason.MAX_TURNS
        groups.append(Group(name, {}, of))
    return groups


def tool_episode(tokenizer):
    """Return a trajectory with a tool call and the answer of the tool."""
    call = {"type": "function", "id": "c", "function": {"name": "look_up", "arguments": '{"what": ["figs", 2]}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool_answer = [{"role": "tool", "name": "look_up", "content": '{"figs": 7}'}]
    turns = [
        token_turn(tokenizer, "count the figs", '<call>{"what": ["figs", 2]}</call>', 3, message=message),
        token_turn(tokenizer, '{"figs": 7}', "7", 3, 1.0, observation=tool_answer),
    ]
    return Trajectory("figs", "eval3/1", 0, turns, StopReason.DONE, score=1.0)


def metrics_row(step):
    """Return the metrics of a step of an hour: a run counts as stopped when it has written nothing for ten steps, and
    on a busy machine the viewer takes minutes to start."""
    row = {"step": step, "rollout/reward/mean": 0.2 + 0.1 * step, "rollout/success/mean": 0.1 * step}
    row |= {"rollout/stop/done": 0.75, "rollout/stop/max_turns": 0.25, "analysis/zero_adv_frac": 0.1}
    row |= {"analysis/logprob_drift/mean": 10.0**-step, "custom/odd_one": 1.0 * step, "time/step": 3600.0}
    if step in (0, 3):
        row |= {"val/success/mean": 0.2 * step, "val/success/ci_low": 0.0, "val/success/ci_high": 0.9}
    return row


ALARM = {
    "rule": "hacked_reward",
    "severity": "alarm",
    "title": "The reward rises <b>while</b> success does not",
    "evidence": ["lenient_frac is 25 % at step 2"],
    "metrics": ["rollout/reward/mean"],
    "steps": [1, 2],
    "proposals": [{"words": ["reward.strict=true"], "why": "it reads too much", "current": ["reward.strict=false"]}],
    "advice": "read the trajectories",
    "expect": "agreement",
    "witnesses": [{"where": "trajectories/train_step_000002.jsonl:2", "summary": "reward 1, score 0: hacked"}],
}


def write_config(path, **more):
    tree = {"name": "page", "seed": 0, "run_dir": str(path), "trainer": {"max_steps": 3}, **more}
    (path / "config.yaml").write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML


def rich_run(path):
    """Write a run with steps 1 to 3, an evaluation at step 3 with hostile text, metrics, a timeline, an alarm and a
    summary."""
    tokenizer = write_tokenizer(path / "tokenizer")
    folder = path / "trajectories"
    folder.mkdir()
    for step in (1, 2, 3):
        write_groups(folder, "train", step, train_groups(tokenizer, step))
    evil = episode(tokenizer, 3, f"evil {HOSTILE}", "eval3/0", 0, text=HOSTILE)
    evil.final_observation = [{"role": HOSTILE, "content": HOSTILE}]
    tools = tool_episode(tokenizer)
    write_groups(folder, "eval_greedy", 3, [Group("eval3/0", {}, [evil]), Group("eval3/1", {}, [tools])])
    rows = "".join(json.dumps(metrics_row(step)) + "\n" for step in range(4))
    (path / "metrics.jsonl").write_text(rows, encoding="utf-8")
    names = [("generate", "generator"), ("update", "trainer"), ("sync", "trainer")]
    spans = [
        {"step": step, "name": name, "lane": lane, "start": 3.0 * step + place, "end": 3.0 * step + place + 0.9}
        for step in (1, 2, 3)
        for place, (name, lane) in enumerate(names)
    ]
    (path / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans), encoding="utf-8")
    (path / "alarms.jsonl").write_text(json.dumps(ALARM) + "\n", encoding="utf-8")
    write_config(path)
    return path


def finish_run(path):
    """Write the summary of a finished run."""
    summary = {"success_before": 0.0, "success_after": 0.6, "reward_after": 0.5, "steps": 3, "seconds": 12.0, "seed": 0}
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (path / "status.txt").write_text("finished\n", encoding="utf-8")
    return path


def add_step(path, step):
    """Write a further step of a run."""
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics_row(step)) + "\n")
    groups = [
        Group(f"new{step}/{place}", {}, [make_trajectory("late", f"new{step}/{place}", index) for index in range(SIZE)])
        for place in range(2)
    ]
    write_groups(path / "trajectories", "train", step, groups)


def long_run(path, count=5000):
    """Write a run with many trajectories in few files, one of which has many tokens."""
    folder = path / "trajectories"
    folder.mkdir(parents=True)
    for step in range(1, 6):
        made = [make_trajectory(f"task-{place}", f"s{step}/{place}", 0) for place in range(count // 5)]
        write_groups(folder, "train", step, [Group(t.group_id, {}, [t]) for t in made])
    tokens = 20_000
    ids = [place % 256 for place in range(tokens)]
    turn = Turn(
        observation_ids=[1],
        action_ids=ids,
        action_logprobs=[-1.0] * tokens,
        version_spans=[(1, tokens)],
        finish=FinishReason.STOP,
        text="",
        message={"role": "assistant", "content": "long"},
    )
    long = Trajectory("long", "long", 0, [turn, turn], StopReason.DONE, score=1.0)
    write_groups(folder, "eval_greedy", 9, [Group("long", {}, [long])])
    (path / "metrics.jsonl").write_text(json.dumps(metrics_row(0)) + "\n", encoding="utf-8")
    write_config(path)
    return path
