"""The tiny policy: the same bytes every time, made once, of training rows alone."""

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from mtrl.environments.family import get_family
from mtrl.models import tiny
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.models.tiny import build, save, tiny_policy, train_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path))
    torch.set_num_threads(1)
    return tmp_path


@pytest.fixture
def builds(monkeypatch):
    """How often something is built."""
    made = []
    monkeypatch.setattr(tiny, "build", lambda *args: made.append(args) or build(*args))
    return made


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_made_twice_it_is_the_same_to_the_byte(start, cache, monkeypatch):
    first = digest(tiny_policy(start))
    torch.manual_seed(123)  # whatever ran before
    random.seed(123)
    monkeypatch.setenv("MTRL_CACHE", str(cache / "other"))
    assert digest(tiny_policy(start)) == first
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= first.keys()


def test_another_seed_is_another_policy(start):
    one, other = tiny_policy(start), tiny_policy(replace(start, seed=1))
    assert one != other and digest(one)["model.safetensors"] != digest(other)["model.safetensors"]


def test_making_it_draws_nothing_from_the_global_streams(start):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_policy(start)
    assert torch.equal(torch.rand(3), expected)


def test_the_second_time_it_is_there(start, builds):
    steps = []
    assert tiny_policy(start, lambda step, loss: steps.append(step)) == tiny_policy(start)
    assert len(builds) == 1 and steps == list(range(start.recipe.sft_steps))


def test_what_makes_another_policy_has_another_key(start, echo):
    class Polite(echo.environment):
        def step(self, response, ground_truth):
            return 0.0, "no, sorry", False

    others = [
        replace(start, seed=1),
        replace(start, recipe=replace(start.recipe, layers=1)),
        replace(start, settings={"calculator": True}),
        replace(start, rows=[*start.rows[:-1], {**start.rows[-1], "more": 1}]),
        replace(start, make_environment=Polite),
        replace(start, make_environment=partial(start.make_environment, max_turns=1)),
    ]
    assert len({start.key(), *(other.key() for other in others)}) == len(others) + 1
    assert replace(start).key() == start.key()


@pytest.mark.parametrize("moment", ["model", "tokenizer", "rename"])
def test_a_half_written_policy_is_not_picked_up(start, builds, cache, monkeypatch, moment):
    """Killed at any moment while it is written, it is made anew."""

    def killed(self, folder, **_):
        if moment != "rename":
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in ("config.json", "half.bin"):
                (Path(folder) / name).write_text("{}")
        raise KeyboardInterrupt

    target = {
        "model": (PreTrainedModel, "save_pretrained"),
        "tokenizer": (PreTrainedTokenizerFast, "save_pretrained"),
        "rename": (Path, "rename"),
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*target, killed)
        tiny_policy(start)
    folder = tiny_policy(start)
    assert len(builds) == 2
    AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert [path.name for path in (cache / "tiny").iterdir()] == [folder.name], "and nothing is left lying about"
    assert not (folder / "half.bin").exists()


def test_saving_again_replaces_the_folder(start, tmp_path):
    model, tokenizer = build(start, lambda step, loss: None)
    save(model, tokenizer, tmp_path / "out")
    (tmp_path / "out" / "stale").touch()
    save(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "stale").exists() and (tmp_path / "out" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_loaded_again_it_speaks_the_same(start):
    folder = tiny_policy(start)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(make_renderer(tokenizer)) is TinyRenderer
    model, original = build(start, lambda step, loss: None)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("train wants 7, number 7")])
    assert ids.tolist() == [original.encode("train wants 7, number 7")]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == original.eos_token_id


def test_training_teaches_what_was_demonstrated(start):
    losses = []
    tiny_policy(replace(start, recipe=replace(start.recipe, sft_steps=30)), lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


# -- held-out rows ----------------------------------------------------------------------------------------------------


def family_folder(name, recipe, family=None):
    """The tiny policy that a run with `environment.name=name` starts from, and its rows."""
    from omegaconf import OmegaConf

    from mtrl.config.schema import Config
    from mtrl.environments.factory import Task, environment_factory
    from mtrl.trainer.setup import tiny_folder

    chosen = {"run_dir": "unused", "environment": {"name": name}}
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), chosen))
    config.data.synthetic_train_rows, config.data.synthetic_test_rows = 30, 30
    config.model.tiny = recipe
    family = family or get_family(name)
    splits = family.load(config.data, 0)
    task = Task(family, splits, environment_factory(config, family))
    folder = tiny_folder(config, task, lambda step, loss: None)
    return folder, splits


@pytest.mark.parametrize("name", ["gsm8k", "text_to_sql", "games"])
def test_held_out_rows_are_never_demonstrated(name, tiny_recipe):
    """The warm start of a whole run, with more demonstrations than rows."""
    family, shown = get_family(name), []
    watched = replace(family, demonstrate=lambda row, rng: shown.append(row["id"]) or family.demonstrate(row, rng))
    _, splits = family_folder(name, {**vars(tiny_recipe), "demonstrations": 70}, watched)
    assert set(shown) == {row["id"] for row in splits.train}
    assert not {row["id"] for row in splits.test} & set(shown)


def test_another_process_makes_the_same_bytes(tiny_recipe, cache):
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_tiny; "
    program += "print(test_tiny.family_folder('gsm8k', eval(sys.argv[2]))[0])"
    command = [sys.executable, "-c", program, str(Path(__file__).parent), repr(vars(tiny_recipe))]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MTRL_CACHE": str(cache / "other")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    there, here = Path(done.stdout.split()[-1]), family_folder("gsm8k", vars(tiny_recipe))[0]
    assert (there.name, digest(there)) == (here.name, digest(here)) and there != here


# -- its tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    talk = [
        [{"role": "user", "content": "add 1234567 and 1234567"}, {"role": "assistant", "content": "<say>2469134</say>"}]
    ]
    return train_tokenizer(talk * 50, 400, ("<say>", "</say>"))


@pytest.mark.parametrize("number", ["1234567", "2469134", " 12", "x1234567y", "3.14", "-12"])
def test_digits_stay_single(tokenizer, number):
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode(number)]
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in number if c.isdigit()]


def test_tags_and_roles_are_whole(tokenizer):
    for text in ("<say>", "</say>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"):
        assert len(tokenizer.encode(text)) == 1
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(f"1{text}2")) == ["1", text, "2"]


def test_tags_are_text_and_roles_are_not(tokenizer):
    """What the environment reads keeps its tags and loses the markers."""
    ids = tokenizer.encode("<|assistant|><say>1</say><|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<say>1</say>"


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n c", "é 漢 🙂", "\t<say> x </say>\r\n", "\x00\x7f"])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_frequent_words_are_merged(tokenizer):
    assert len(tokenizer.encode(" and")) == 1 and len(tokenizer) <= 400
