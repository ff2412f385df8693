"""A missing framework of an agent is one sentence, before the first token."""

import sys
from importlib import import_module

import pytest

from mtrl.errors import UserError
from mtrl.main import prepare


@pytest.fixture
def without(monkeypatch):
    """Function `without(module, example)` that hides a module, and forgets the import of the example."""

    def without(module, example):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, f"examples.agents.{example}", raising=False)

    return without


@pytest.mark.parametrize(
    ("example", "module", "sentence"),
    [
        (
            "langchain_agent",
            "langchain_openai",
            "langchain is not installed; .*pip install 'mtrl-agents\\[langchain\\]'",
        ),
        (
            "pydantic_ai_agent",
            "pydantic_ai",
            "pydantic-ai-slim is not installed; .*pip install 'mtrl-agents\\[pydantic-ai\\]'",
        ),
        ("smolagents_agent", "smolagents", "smolagents is not installed; .*pip install 'mtrl-agents\\[smolagents\\]'"),
        ("strands_agent", "strands", "strands-agents is not installed; .*pip install 'mtrl-agents\\[strands\\]'"),
    ],
)
def test_a_configuration_with_a_missing_framework_is_refused(without, example, module, sentence):
    without(module, example)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        prepare(["experiment=agent_word_problems", f"generator.agent.target=examples.agents.{example}.run"])


def test_a_service_with_a_missing_framework_does_not_start(without):
    without("sagemaker.train.rft", "rft_agent")
    with pytest.raises(SystemExit, match="^sagemaker is not installed; .*pip install 'mtrl-agents\\[sagemaker\\]'$"):
        import_module("examples.agents.rft_agent")
