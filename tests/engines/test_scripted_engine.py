"""The scripted engine returns fixed responses by the protocol of engines, as if they were sampled."""

import asyncio
import inspect

import pytest

from mtrl.engines.base import Engine, SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.scripted import ScriptedEngine
from mtrl.types import FinishReason


@pytest.fixture
def ask(tiny_tokenizer):
    """Function `ask(engine, id, **sampling)` that returns the next turn, with the stop token of the tiny policy."""

    def ask(engine, trajectory_id="a", **sampling):
        params = SamplingParams(stop_token_ids=(tiny_tokenizer.eos_token_id, 5), **sampling)
        return asyncio.run(engine.generate(trajectory_id, [1, 2, 3], params))

    return ask


@pytest.mark.parametrize("engine", [ScriptedEngine, LocalEngine])
def test_engines_implement_the_protocol(engine):
    for name, method in inspect.getmembers(Engine, inspect.isfunction):
        if not name.startswith("_"):
            mine = getattr(engine, name)
            assert inspect.signature(mine).parameters.keys() == inspect.signature(method).parameters.keys()
            assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(method)


def test_a_function_gives_the_responses(ask, tiny_tokenizer):
    engine = ScriptedEngine(lambda trajectory_id, turn: f"{trajectory_id} {turn}", tiny_tokenizer)
    engine.open("a")
    engine.open("b")
    message = [tiny_tokenizer.decode(ask(engine, name).token_ids) for name in "aab"]
    assert message == ["a 0<|end|>", "a 1<|end|>", "b 0<|end|>"]


def test_open_restarts_the_turn_count(ask, tiny_tokenizer):
    engine = ScriptedEngine(lambda trajectory_id, turn: str(turn), tiny_tokenizer)
    for _ in range(2):
        engine.open("a")
        assert [tiny_tokenizer.decode(ask(engine).token_ids) for _ in range(2)] == ["0<|end|>", "1<|end|>"]
        engine.release("a")


def test_lists_give_the_responses_until_they_end(ask, tiny_tokenizer):
    engine = ScriptedEngine({"a": ["x", "y"]}, tiny_tokenizer)
    engine.open("a")
    assert [tiny_tokenizer.decode(ask(engine).token_ids) for _ in range(2)] == ["x<|end|>", "y<|end|>"]
    with pytest.raises(ValueError, match="a has 2 responses, and its turn 3 needs one more"):
        ask(engine)
    with pytest.raises(ValueError, match="there are no responses for the trajectory b"):
        ask(engine, "b")


def test_the_fields_of_a_generation(ask, tiny_tokenizer):
    engine = ScriptedEngine(lambda *_: "one 12", tiny_tokenizer)
    asyncio.run(engine.load_weights(None, 7))
    generation = ask(engine)
    ids = [*tiny_tokenizer.encode("one 12"), tiny_tokenizer.eos_token_id]
    assert generation.token_ids == ids and generation.logprobs == [0.0] * len(ids)
    assert generation.version_spans == [(7, len(ids))] and generation.finish == FinishReason.STOP
    assert (engine.stats.prompt_tokens, engine.stats.sampled_tokens) == (3, len(ids))


def test_a_long_response_is_truncated(ask, tiny_tokenizer):
    engine = ScriptedEngine(lambda *_: "12345", tiny_tokenizer)
    generation = ask(engine, max_generate_length=4)
    assert tiny_tokenizer.decode(generation.token_ids) == "1234" and generation.finish == FinishReason.LENGTH
    assert ask(engine, max_generate_length=6).finish == FinishReason.STOP
