"""Every key with a few allowed words is checked against the words of its field."""

import pytest

from mtrl.algorithms.registry import Registry
from mtrl.cli.completion import completions
from mtrl.command.compose import compose
from mtrl.config.foreign import allowed
from mtrl.config.keys import all_keys, words
from mtrl.errors import UserError

CHOICES = {path: key.choices for path, key in all_keys().items() if key.choices}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("async_config.on_stale", ("wait", "requeue")),
        ("algorithm.credit", ("trajectory", "turn", "turn+outcome")),
        ("trainer.fsdp.param_dtype", ("bfloat16", "float32")),
        *(
            (f"{section}.optimizer.schedule", ("constant", "linear", "cosine"))
            for section in ("trainer", "algorithm.critic")
        ),
        *((f"generator.{engine}.lora", ("merged", "adapter")) for engine in ("vllm", "sglang")),
    ],
)
def test_words_of_every_kind_and_of_sections_that_are_used_twice(path, expected):
    assert words(path) == expected


def test_the_words_are_those_of_text_keys_without_a_registry():
    assert len(CHOICES) > 20
    for path, found in CHOICES.items():
        key = all_keys()[path]
        assert key.type is str and not key.functions and len(set(found)) == len(found) > 1
        assert key.default in found or (key.optional and key.default is None), path


@pytest.mark.parametrize("path", CHOICES)
def test_another_word_is_refused_with_the_words_of_the_field(path):
    with pytest.raises(UserError) as caught:
        compose([f"{path}=zzz"])
    listed = ", ".join(all_keys()[path].choices)
    assert str(caught.value) == f"{path}=zzz is not known; choose one of {listed}"
    assert allowed(path) == f"one of {listed}"
    assert completions(f"mtrl train {path}=") == [*all_keys()[path].choices]


@pytest.mark.parametrize("word", ["float16", "fp16"])
def test_weights_in_float16_are_refused(word):
    with pytest.raises(UserError, match=rf"model\.dtype={word} needs loss scaling, which .*; set bfloat16"):
        compose([f"model.dtype={word}"])


def test_float16_is_refused_because_the_loss_is_not_scaled():
    with pytest.raises(UserError) as caught:
        compose(["trainer.fsdp.param_dtype=float16"])
    assert str(caught.value) == (
        "trainer.fsdp.param_dtype=float16 needs loss scaling, which mtrl does not have; set bfloat16"
    )


def test_registered_functions_of_a_user_are_listed_too(monkeypatch):
    key = "algorithm.advantage_method"
    monkeypatch.setattr("mtrl.config.keys.OWN_FUNCTIONS", {})
    Registry(key, "mtrl.algorithms.advantages").register("my_estimator")(lambda batch, config: batch.rewards)
    assert completions(f"mtrl train {key}=my_e") == ["my_estimator"]
    with pytest.raises(UserError, match=f"verl's spelling; set {key}, one of .*, my_estimator, or package.module"):
        compose(["algorithm.adv_estimator=unknown"])


def test_functions_of_another_key_are_not_listed():
    Registry("reward.components", "mtrl.rewards.shaping").register("my_component")(lambda *_: 0.0)
    assert words("reward.components") == ()
