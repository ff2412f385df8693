"""Every key that takes one of a few words is checked against the words that its field states."""

import pytest

from mtrl.cli.completion import completions
from mtrl.command.compose import compose
from mtrl.config.choices import CHOICES, REGISTERED
from mtrl.config.foreign import allowed
from mtrl.config.keys import all_keys
from mtrl.errors import UserError


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("async_config.on_stale", ("wait", "requeue")),
        ("algorithm.credit", ("trajectory", "turn", "turn+outcome")),
        ("trainer.fsdp.param_dtype", ("bfloat16", "float16", "float32")),
        *(
            (f"{section}.optimizer.schedule", ("constant", "linear", "cosine"))
            for section in ("trainer", "algorithm.critic")
        ),
        *((f"generator.{engine}.lora", ("merged", "adapter")) for engine in ("vllm", "sglang")),
    ],
)
def test_words_of_every_kind_and_of_sections_that_are_used_twice(path, words):
    assert CHOICES[path] == words


def test_the_words_are_those_of_text_keys_without_a_registry():
    assert len(CHOICES) > 20 and not CHOICES.keys() & REGISTERED.keys()
    for path, words in CHOICES.items():
        key = all_keys()[path]
        assert key.type is str and key.choices == words and len(set(words)) == len(words) > 1
        assert key.default in words or (key.optional and key.default is None), path


@pytest.mark.parametrize("path", CHOICES)
def test_another_word_is_refused_with_the_words_of_the_field(path):
    with pytest.raises(UserError) as caught:
        compose([f"{path}=zzz"])
    words = ", ".join(all_keys()[path].choices)
    assert str(caught.value) == f"{path}=zzz is not known; choose one of {words}"
    assert allowed(path) == f"one of {words}"
    assert completions(f"mtrl train {path}=") == [*all_keys()[path].choices]
