"""Settings of agents: wrong ones are refused, and those without effect cause a warning."""

import pytest

from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.errors import UserError

TARGET = "generator.agent.target=config_agent_functions.play"


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    code = "def play(row, client): ...\ndef shy(row): ...\nnumber = 3\n"
    (tmp_path / "config_agent_functions.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


def warnings_of(*words):
    return check(compose(list(words)))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            [TARGET, "generator.agent.url=http://a"],
            "generator.agent.target and generator.agent.url both name an agent program",
        ),
        (["environment=agent"], "environment.name=agent needs an agent program, and none is named; set"),
        (
            [TARGET, "generator.use_conversation_multi_turn=false"],
            "generator.use_conversation_multi_turn=false puts all",
        ),
        (
            ["generator.agent.target=config_agent_functions.plays"],
            "generator.agent.target=config_agent_functions.plays",
        ),
        (["generator.agent.target=config_agent_functions.number"], "is a int; it must be a function"),
        (["generator.agent.target=config_agent_functions.shy"], "cannot be called as function(row, client)"),
        (["generator.agent.command=[]"], "generator.agent.command=[] names no program"),
        (["generator.agent.command=[no-such-program,1]"], "no-such-program is no program; write its path"),
        (["generator.agent.url=localhost:80"], "generator.agent.url=localhost:80 is no address of an agent"),
        (["generator.agent.url='http://['"], "generator.agent.url=http://[ is no address of an agent"),
        (["generator.agent.url=http://a:b"], "generator.agent.url=http://a:b is no address of an agent"),
        (
            [TARGET, "generator.agent.host=0.0.0.0"],
            "generator.agent.host=0.0.0.0 is no address that a program can reach",
        ),
        ([TARGET, "generator.agent.max_concurrent=0"], "generator.agent.max_concurrent=0 must be at least 1"),
        (
            ["generator.agent.command=[python]", "generator.agent.env={MY_API_KEY: abc}"],
            "generator.agent.env.MY_API_KEY looks like a secret, and config.yaml, run.log and the console would show",
        ),
        (
            ["generator.agent.command=[python]", "generator.agent.env={STORE: 'postgres://me:abc@db/x'}"],
            "write generator.agent.pass_env=[STORE]",
        ),
        (
            ["generator.agent.command=[python]", "generator.agent.pass_env=[NOT_THERE_AT_ALL]"],
            "generator.agent.pass_env=[NOT_THERE_AT_ALL] is no environment variable here; export NOT_THERE_AT_ALL",
        ),
        ([TARGET, "generator.agent.max_calls=0"], "generator.agent.max_calls=0 must be at least 1"),
        ([TARGET, "generator.agent.leave_out=[sides]"], "generator.agent.leave_out=sides"),
    ],
)
def test_agents_that_cannot_run_are_refused(words, told):
    with pytest.raises(UserError) as error:
        warnings_of(*words)
    assert told in str(error.value) and "abc" not in str(error.value)


def test_an_agent_changes_nothing_else():
    assert warnings_of(TARGET) == warnings_of()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generator.agent.max_calls=3"], "generator.agent.max_calls=3 has no effect with no agent program"),
        (["generator.agent.leave_out=[side]"], "generator.agent.leave_out=[side] has no effect with no agent program"),
        ([TARGET, "generator.agent.env={A:b}"], "generator.agent.env={A:b} has no effect with"),
        (
            [TARGET, "generator.agent.api_key_env=K"],
            "generator.agent.api_key_env=K has no effect with generator.agent.url",
        ),
        ([TARGET, "reward.scheme=guide"], "reward.scheme=guide has no effect with a program"),
        (
            [TARGET, "generator.agent.host=10.0.0.1"],
            "generator.agent.host=10.0.0.1 lets other machines call the policy",
        ),
        (
            ["generator.agent.command=[python]"],
            "generator.local.deterministic lets every turn wait until each running program",
        ),
        (
            [TARGET, "environment=agent"],
            "mtrl.environments.agent.FAMILY has no scorer of its own, so the number that the program",
        ),
        (
            [TARGET, "model=hf", "model.path=X", "environment.step_timeout=3"],
            "environment.step_timeout=3.0 has no effect with a program",
        ),
    ],
)
def test_agent_settings_without_effect_are_warned_about(words, told):
    assert any(told in warning for warning in warnings_of(*words)), warnings_of(*words)


@pytest.mark.parametrize(
    ("name", "package"), [("agent_word_problems", "openai"), ("agent_mini_swe", "minisweagent")], ids=lambda word: word
)
def test_experiments_of_agents_are_without_fault(name, package):
    pytest.importorskip(package)
    assert warnings_of(f"experiment={name}") == []


def test_a_fast_engine_needs_no_warning_about_slow_programs():
    words = ["generator.agent.command=[python]", "generator.local.deterministic=false"]
    assert not any("slowest" in warning for warning in warnings_of(*words))


def test_tasks_that_programs_play_load_rows(tmp_path):
    from mtrl.environments.agent import ProgramTask, agent_family
    from mtrl.environments.factory import load_task

    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"prompt": "{split}?", "answer": "yes"}}\n')
    from omegaconf import OmegaConf

    task = load_task(OmegaConf.to_object(compose(["environment=agent", TARGET, f"data.path={tmp_path}"])))
    assert [row["prompt"][-1]["content"] for row in (*task.splits.train, *task.splits.test)] == ["train?", "test?"]
    assert not task.family.has_scorer and agent_family("mine", lambda trajectory, row: 1.0).has_scorer
    with pytest.raises(UserError, match="this task is run by a program"):
        ProgramTask().step("hello", {})
