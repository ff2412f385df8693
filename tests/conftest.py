"""Fixtures of many tests: tokenizers, codecs and tiny random models, and an own cache folder."""

import gc
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hydra_cache import caching

settings.register_profile("mtrl", deadline=None)  # the machine may be busy, so no test has a deadline
settings.load_profile("mtrl")

# Jobs in the background ignore these signals (nohup, `&` in a script), and would pass that on to every program.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's template, without tools and thinking."""
CHATML_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
CHATML_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CORPUS = [
    [
        {"role": "system", "content": "answer the question, then stop."},
        {"role": "user", "content": "how many apples are 12 + 34?"},
        {"role": "assistant", "content": "the answer is <sql>select 46</sql>"},
        {"role": "tool", "content": "46 apples and 79 pears"},
    ]
] * 4


COLLECTED = pytest.StashKey()

gc.disable()  # until all tests are collected: the imported modules stay, and visits to them took a sixth of the time


def pytest_configure(config):
    """Let each worker of pytest-xdist begin the collection of the whole suite at another place. All of them compile a
    test module that none has compiled so far, and so each compiles its share, which the others then read."""
    worker = getattr(config, "workerinput", None)
    tests = Path(__file__).parent
    if worker is not None and [Path(config.rootpath, arg) for arg in config.args] == [tests]:
        places = sorted({tests / path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")})
        first = int(worker["workerid"].removeprefix("gw")) * len(places) // worker["workercount"]
        config.args = [str(place) for place in (*places[first:], *places[:first])]


def pytest_collection_modifyitems(items):
    """Give the tests the same order in each worker of pytest-xdist."""
    items.sort(key=lambda item: str(item.path))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    """Give a folder the same nodes each time that it is collected.

    For each file of the command line, pytest collects the file's folder again, with new nodes for the folders in it.
    pytest 9.1 knows the fixtures of a `conftest.py` by the first node of its folder only, so that `pytest
    tests/engines/A.py tests/B.py tests/engines/C.py` did not find those of `tests/engines` for the last file.
    """
    report = yield
    return collector.stash.setdefault(COLLECTED, report) if isinstance(collector, pytest.Directory) else report


def pytest_collection_finish():
    """Exempt the imported modules and the collected tests from garbage collection, and let it run less often. Repeated
    visits to them took a fifth of the time of tests that compose configurations."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def cached_merges():
    with caching():
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Set the cache folder to a temporary one, so that no test uses the cache of the user. All workers of pytest-xdist
    share it, so that each warm start is made once."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of the folders of all workers
    patch = pytest.MonkeyPatch()
    patch.setenv("MTRL_CACHE", str(folder / "mtrl_cache"))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _restored_log_level():
    """Restore the level of the logger, which programs in this process change."""
    log = logging.getLogger("mtrl")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True)
def _no_group_of_ranks():
    """Destroy the process group that a test has left in this process: forked ranks of a later test would inherit it."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A tokenizer like that of the tiny policy."""
    from mtrl.models.tiny import train_tokenizer

    return train_tokenizer(CORPUS, 340, ("<sql>", "</sql>"))


@pytest.fixture(scope="session")
def tiny_codec(tiny_tokenizer):
    from mtrl.models.renderer import make_renderer
    from mtrl.rollout.conversation import Codec

    return Codec(tiny_tokenizer, make_renderer(tiny_tokenizer))


@pytest.fixture(scope="session")
def tiny_recipe():
    """Sizes of a very small model."""
    from mtrl.config.model_schema import TinyConfig

    return TinyConfig(
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=2,
        vocabulary=340,
        context=256,
        init_std=0.3,
    )


@pytest.fixture(scope="session")
def make_tiny_model(tiny_recipe, tiny_tokenizer):
    """Function `make_tiny_model(seed=0)` that returns a random Qwen3 for the tiny tokenizer, in evaluation mode."""
    import torch

    from mtrl.models.tiny import make_model

    torch.set_num_threads(1)
    return lambda seed=0: make_model(tiny_recipe, tiny_tokenizer, seed).eval()


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model):
    """A model that tests share and must not train; `make_tiny_model` makes another."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def make_chatml_tokenizer():
    """Function `make_chatml_tokenizer(template=CHATML, eos=…)` that makes a tokenizer with the tokens of Qwen3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(template=CHATML, eos="<|im_end|>"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(CHATML_SPECIAL), initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(["user assistant system hello world answer"] * 9, trainer)
        tokenizer.add_tokens([AddedToken(word, special=False) for word in CHATML_WORDS])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=eos, pad_token="<|endoftext|>", chat_template=template
        )

    return make


@pytest.fixture(scope="session")
def chatml_tokenizer(make_chatml_tokenizer):
    return make_chatml_tokenizer()
