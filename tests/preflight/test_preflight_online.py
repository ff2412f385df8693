"""Tasks that make requests to a server: the pre-flight says that they are not hermetic, and makes no request itself."""

import pytest
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.environments.factory import load_task
from mtrl.preflight import at_start
from mtrl.preflight.at_start import all_results, holds_all
from mtrl.preflight.checklist import CHEAP, CHECKS, run
from mtrl.preflight.context import CheckContext
from mtrl.preflight.result import Status, to_json
from tests.engines.chat_server import ChatServer, always, chat_reply

FEW = ("experiment=service", "data.synthetic_train_rows=8", "data.synthetic_test_rows=4", "preflight.model=false")


@pytest.fixture
def online(monkeypatch):
    """Configuration and task with a customer behind a server, and the server."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(at_start, "LIMIT", 60.0)  # the machine may be busy
    with ChatServer(always(chat_reply("Yes."))) as server:
        settings = f"environment.config.endpoint={{url:'{server.url}',model:m}}"
        config = OmegaConf.to_object(compose([*FEW, "environment.config.customer=endpoint", settings]))
        yield config, load_task(config), server


def test_the_checks_say_in_one_line_that_the_task_is_not_hermetic(online):
    config, task, server = online
    context = CheckContext(config, task.family, task.splits, task.make_environment, 2, 20.0, processes=2)
    checks = [(name, CHECKS[name]) for name in ("hermetic", "gold", "concurrency", "tool_spam")]
    first, *others = run(context, checks)
    assert (first.name, first.status) == ("hermetic", Status.WARN)
    assert first.evidence == (
        "service is not hermetic: with environment.config.customer=endpoint a server writes observations, which differ "
        "each time. All checks replace it by the task's offline settings"
    )
    assert [result.status for result in others] == [Status.PASS] * 3
    assert server.requests == []


def test_a_run_says_it_at_its_start(online, tmp_path):
    config, task, server = online
    results = all_results(config, task)
    assert [result.name for result in results] == ["hermetic", *CHEAP] and results[0].status == Status.WARN
    assert server.requests == []
    (tmp_path / "found.json").write_text(to_json("x", results))
    assert not holds_all(tmp_path / "found.json"), "a later run at the same path replaces it"


def test_a_scripted_task_is_declared_nowhere(monkeypatch):
    monkeypatch.setattr(at_start, "LIMIT", 60.0)  # the machine may be busy
    config = OmegaConf.to_object(compose(FEW))
    task = load_task(config)
    context = CheckContext(config, task.family, task.splits, task.make_environment, 2, 20.0)
    assert context.replaced == {} and context.config is config
    assert [result.name for result in all_results(config, task)] == list(CHEAP)
