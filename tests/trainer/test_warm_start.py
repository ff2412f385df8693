"""The warm start: imitation until the measured success rate is inside the band, on training rows only; made once, and
equal everywhere."""

import copy
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mtrl.datasets import Splits
from mtrl.environments.factory import Task, environment_factory
from mtrl.environments.family import get_family
from mtrl.errors import UserError
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.trainer.loading import load_model
from mtrl.trainer.setup import warm_start as module
from mtrl.trainer.setup.connect import connect
from mtrl.trainer.setup.parts import shared_engine
from mtrl.trainer.setup.warm_start import WarmStartResult, cache_key, success_of, warm_start
from tests.echo import Echo, rows
from tests.trainer.warming import SIZES, Script, config_of, digest, echo_task, same, started


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A temporary cache."""
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    return tmp_path / "cache"


def family_start(name, family=None):
    """Make the warm start of a run with `environment.name=name` and more demonstrations than rows. Return its folder
    and its rows."""
    config = config_of({"tiny": {**SIZES, "context": 1024}}, demonstrations=70)
    config.environment.name, config.generator.max_turns = name, 6
    config.data.synthetic_train_rows, config.data.synthetic_test_rows = 30, 30
    family = family or get_family(name)
    splits = family.load(config.data, 0)
    return started(config, Task(family, splits, environment_factory(config, family)))[0], splits


# -- made once, and the same everywhere --------------------------------------------------------------------------------


def test_two_warm_starts_are_equal_byte_for_byte(cache, monkeypatch):
    first = digest(started(config_of(), echo_task())[0])
    torch.manual_seed(123)  # code that ran before has no effect
    random.seed(123)
    monkeypatch.setenv("MTRL_CACHE", str(cache / "other"))
    assert digest(started(config_of(), echo_task())[0]) == first
    assert {"config.json", "model.safetensors", "tokenizer.json", "warm_start.json"} <= first.keys()


@pytest.mark.ci
def test_another_process_writes_the_same_bytes(cache):
    program = "import sys; sys.path.insert(0, sys.argv[1]); import test_warm_start; "
    program += "print(test_warm_start.family_start('gsm8k')[0])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MTRL_CACHE": str(cache / "other"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    there, here = Path(done.stdout.split()[-1]), family_start("gsm8k")[0]
    assert (there.name, digest(there)) == (here.name, digest(here)) and there != here


def test_a_warm_start_does_not_change_the_global_random_state():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seed()
    expected = draw()
    seed()
    started(config_of(), echo_task())
    assert draw() == expected


def test_the_second_warm_start_is_read_from_the_cache():
    steps, measure = [], Script(0.25)
    one, two = (
        warm_start(config_of(), echo_task(), measure, lambda step, success: steps.append(step)) for _ in range(2)
    )
    assert one[0] == two[0] and str(one[1]) == str(two[1])
    assert len(measure.policies) == 1 and steps == [1, 2, 3, 4]


def test_runs_that_start_together_make_one_warm_start():
    """The second waits for the first, and reads its result."""
    measuring, others_wait = threading.Event(), threading.Event()

    def measure(model, tokenizer):
        measuring.set()
        assert others_wait.wait(60)
        return 0.5

    def other():
        measuring.wait(60)
        others_wait.set()
        return warm_start(config_of(), echo_task(), Script())  # whose success rate is not measured

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(warm_start, config_of(), echo_task(), measure)
        assert pool.submit(other).result(60) == first.result(60)
    assert first.result()[1].success == 0.5


def test_a_damaged_file_in_the_cache_is_logged_and_the_warm_start_made_again(caplog):
    folder = Path(warm_start(config_of(), echo_task(), Script(0.5))[0])
    names = sorted(file.name for file in folder.iterdir() if file.name != "SHA256SUMS")
    assert {"warm_start.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(names)
    for name in names:
        intact = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
        caplog.clear()
        measure = Script(0.5)
        assert warm_start(config_of(), echo_task(), measure)[0] == str(folder)
        assert len(measure.policies) == 1 and (folder / name).read_bytes() == intact
        assert f"is damaged ({name}: not as it was written" in caplog.text


def test_the_record_is_read_back(cache):
    path, result = warm_start(config_of(), echo_task(), Script(0.25))
    assert result == WarmStartResult(success=0.25, episodes=4, steps=4, band=(0.0, 1.0))
    assert str(result) == "25.0% of 4 sampled episodes succeed after 4 updates of imitation (wanted: 0% to 100%)"
    assert json.loads((Path(path) / "warm_start.json").read_text())["success"] == 0.25
    _, again = warm_start(config_of(), echo_task(), Script())
    assert (again.success, again.episodes, again.steps, tuple(again.band), again.path) == (0.25, 4, 4, (0, 1), None)
    assert str(again) == str(result)
    assert WarmStartResult.read(cache) is None
    turns = "25.0% of 4 sampled episodes succeed in 3 turns or more after 4 updates of imitation"
    assert str(replace(result, min_turns=3)).startswith(turns)


class Polite(Echo):
    def step(self, response, ground_truth):
        return 0.0, "no, sorry", False


def another_score(trajectory, row):
    return 0.0


def changed(**sections):
    """Return the configuration with other values: `generator__max_turns=2`."""
    config = config_of()
    for key, value in sections.items():
        *path, last = key.split("__")
        place = config
        for name in path:
            place = getattr(place, name)
        setattr(place, last, value)
    return config


def test_settings_that_change_the_policy_change_the_key():
    task, moved = echo_task(), rows("train", 12)
    moved[-1]["more"] = 1
    others = [
        (changed(seed=1), task),
        (changed(model__tiny__layers=1), task),
        (changed(model__warm_start__success_band=(0.0, 0.9)), task),
        (changed(model__warm_start__check_every=5), task),
        (changed(model__warm_start__episodes=5), task),
        (changed(model__warm_start__lr=1e-3), task),
        (changed(environment__config={"calculator": True}), task),
        (changed(generator__max_turns=2), task),
        (changed(generator__sampling_params__temperature=0.5), task),
        (changed(evaluation__success_threshold=0.5), task),
        (changed(reward__components={"environment": 0.5}), task),
        (config_of(), replace(task, splits=Splits(moved, task.splits.test))),
        (config_of(), replace(task, splits=Splits(rows("train", 13), task.splits.test))),
        (config_of(), echo_task(Polite)),
        (config_of(), echo_task(score=another_score)),
        (config_of(), replace(task, make_environment=partial(Echo, max_turns=1))),
    ]
    keys = [cache_key(config, task) for config, task in others]
    assert len({cache_key(config_of(), task), *keys}) == len(others) + 1


def test_measured_rows_change_the_key_and_unused_rows_do_not():
    few = changed(model__warm_start__demonstrations=2, model__warm_start__episodes=2)
    measured, unused = rows("train", 12), rows("train", 12)
    measured[6]["more"] = unused[11]["more"] = 1
    key, of_measured, of_unused = (
        cache_key(few, replace(echo_task(), splits=Splits(train, [])))
        for train in (rows("train", 12), measured, unused)
    )
    assert key == of_unused != of_measured


def test_settings_of_the_training_do_not_change_the_key():
    settled = cache_key(config_of(), echo_task())
    assert cache_key(config_of(), echo_task()) == settled
    after = changed(trainer__max_steps=7, trainer__optimizer__lr=1.0, algorithm__group_size=3, run_dir="other")
    other_test_rows = replace(echo_task(), splits=Splits(rows("train", 12), rows("test", 3)))
    assert cache_key(after, echo_task()) == cache_key(config_of(), other_test_rows) == settled
    source = {"environment": {"name": "echo"}}
    mixtures = source, source | {"weight": 2, "algorithm": {"group_size": 3}}, source | {"reward": {"level": "turn"}}
    first, same_policy, other = (cache_key(changed(environments={"a": own}), echo_task()) for own in mixtures)
    assert first == same_policy != other


@pytest.mark.parametrize("moment", ["model", "tokenizer", "rename", "record", "checksums"])
def test_an_incomplete_policy_in_the_cache_is_not_used(cache, monkeypatch, moment):
    """After a kill at any moment of the writing, the warm start is made again."""

    def killed(self, folder, **_):
        if moment in ("model", "tokenizer"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in ("config.json", "half.bin"):
                (Path(folder) / name).write_text("{}")
        raise KeyboardInterrupt

    target = {
        "model": (PreTrainedModel, "save_pretrained"),
        "tokenizer": (PreTrainedTokenizerFast, "save_pretrained"),
        "rename": (Path, "rename"),
        "record": (module, "replace_text"),
        "checksums": (module, "write_checksums"),
    }[moment]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*target, killed)
        warm_start(config_of(), echo_task(), Script(0.5))
    measure = Script(0.5)
    folder = Path(warm_start(config_of(), echo_task(), measure)[0])
    assert len(measure.policies) == 1
    AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    left = {path.name for path in (cache / "warm_start").iterdir()}
    assert left == {folder.name, f"{folder.name}.lock"}, "and nothing is left lying about"
    assert not (folder / "half.bin").exists()


def test_the_measured_policy_is_the_loaded_one():
    measure = Script(0.5)
    path, _ = warm_start(config_of(), echo_task(), measure)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert same(loaded.state_dict(), measure.policies[-1])
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert type(make_renderer(tokenizer)) is TinyRenderer
    assert len(tokenizer.encode("<say>")) == 1 and loaded.config.eos_token_id == tokenizer.eos_token_id


def test_a_task_without_a_demonstrator_is_an_error_in_one_sentence():
    with pytest.raises(UserError) as caught:
        warm_start(config_of(), echo_task(demonstrate=None), Script())
    assert str(caught.value) == (
        "model.warm_start needs a demonstrator, and echo has none: give it a `demonstrate`, or set model=hf "
        "model.path=FOLDER model.warm_start.enabled=false"
    )


# -- held-out rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gsm8k", "text_to_sql", "games"])
def test_held_out_rows_are_never_demonstrated(name):
    """The test makes the warm start of a whole run, with more demonstrations than rows."""
    family, shown = get_family(name), []
    watched = replace(family, demonstrate=lambda row, rng: shown.append(row["id"]) or family.demonstrate(row, rng))
    _, splits = family_start(name, watched)
    assert set(shown) == {row["id"] for row in splits.train}
    assert not {row["id"] for row in splits.test} & set(shown)


@pytest.mark.parametrize(("episodes", "measured"), [(4, [0, 3, 6, 9]), (30, [n * 12 // 30 for n in range(30)])])
def test_success_is_measured_on_training_rows_spread_over_the_split(episodes, measured):
    seen = []

    class Watched(Echo):
        def reset(self, row=None):
            seen.append(row["id"])
            return super().reset(row)

    config, task = config_of(episodes=episodes), echo_task()
    model, tokenizer = made(config, task)
    success_of(config, replace(task, make_environment=partial(Watched, max_turns=3)), connected(config, task), model,
               tokenizer)  # fmt: skip
    assert not seen, "the demonstrations and what connects play on the task that they are given"
    watched = replace(task, make_environment=partial(Watched, max_turns=3))
    success_of(config, watched, connected(config, watched), model, tokenizer)
    assert sorted(seen) == sorted(f"train-{n}" for n in measured)


# -- the measurement --------------------------------------------------------------------------------------------------


def connected(config, task):
    """Return the function that connects a model to this task, as in a run."""
    return lambda model, tokenizer: connect(
        config, task, model.config, tokenizer, [], partial(shared_engine, config, model, tokenizer)
    )


@pytest.fixture(scope="session")
def warmed(tmp_path_factory):
    """Folder of a policy that sometimes repeats digits, from a real warm start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTRL_CACHE", str(tmp_path_factory.mktemp("warmed")))
        config, steps = config_of(success_band=[0.2, 0.9], check_every=25, episodes=60), []
        path, result = started(config, echo_task(), lambda step, success: steps.append((step, success)))
    return SimpleNamespace(config=config, path=path, result=result, steps=steps)


def made(config, task):
    """Policy after four updates from random weights."""
    path, _ = warm_start(config, task, Script(0.5))
    return load_model(config, path)


def test_a_real_warm_start_reaches_the_band(warmed):
    """All parts are real: demonstrations, updates, the engine, the scorer."""
    low, high = warmed.result.band
    assert (low, high) == (0.2, 0.9) and low <= warmed.result.success <= high and warmed.result.path is None
    assert warmed.result.episodes == 60 and 0 < warmed.result.steps <= len(warmed.steps)
    assert [step for step, _ in warmed.steps] == list(range(1, len(warmed.steps) + 1))
    assert WarmStartResult.read(warmed.path).success == warmed.result.success


def test_the_loaded_policy_has_the_measured_success_rate(warmed):
    task = echo_task()
    again = success_of(warmed.config, task, connected(warmed.config, task), *load_model(warmed.config, warmed.path))
    assert again == warmed.result.success


def test_measuring_does_not_change_the_model(warmed):
    config, task = warmed.config, echo_task()
    model, tokenizer = load_model(config, warmed.path)
    before, mode = copy.deepcopy(model.state_dict()), model.training
    success_of(config, task, connected(config, task), model, tokenizer)
    assert same(model.state_dict(), before) and model.training == mode
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages), "no engine has fused them"


class Fickle(Echo):
    """Scorer that accepts any response on even rows and raises on every third row."""

    def reset(self, row=None):
        self.number = int(row["id"].split("-")[1])
        return super().reset(row)

    def step(self, response, ground_truth):
        if self.number % 3 == 0:
            raise RuntimeError("every third")
        return float(self.number % 2 == 0), None, True


def test_failed_episodes_count_in_the_success_rate(warmed):
    """Four of the 12 rows fail, and every second one of the other eight is right."""
    config = config_of(episodes=24)
    config.environment.retries = 0
    task = echo_task(Fickle)
    assert success_of(config, task, connected(config, task), *load_model(config, warmed.path)) == 4 / 12


@pytest.mark.parametrize(
    ("least", "share", "fold"), [(1, 1.0, "none"), (3, 0.5, "none"), (4, 0.0, "none"), (4, 0.0, "summarise")]
)
def test_successes_in_too_few_turns_do_not_count(warmed, least, share, fold):
    """Every episode succeeds: on even rows in the first turn, on odd rows in the third, with two summaries that are no
    turns of the environment if the context is folded."""

    class Patient(Echo):
        def reset(self, row=None):
            self.left = 1 + 2 * (int(row["id"].split("-")[1]) % 2)
            return super().reset(row)

        def step(self, response, ground_truth):
            self.left -= 1
            return float(self.left == 0), "again", self.left == 0

    config = config_of(episodes=12, min_turns=least)
    config.generator.context.fold, config.generator.context.threshold = fold, 1
    task = echo_task(Patient)
    assert success_of(config, task, connected(config, task), *load_model(config, warmed.path)) == share


def test_more_turns_than_an_episode_can_have_are_an_error():
    config = config_of(min_turns=4)
    config.generator.max_turns = 3
    with pytest.raises(UserError, match=r"min_turns=4 counts no .* generator\.max_turns=3; lower it to at most 3"):
        warm_start(config, echo_task(), never)
    config.environments = {"a": {"environment": {"name": "echo"}, "generator": {"max_turns": 2}}}
    with pytest.raises(UserError, match=r"generator\.max_turns=2; lower it to at most 2"):
        warm_start(config, echo_task(), never)


@pytest.mark.parametrize(("threshold", "share"), [(0.5, 1.0), (0.51, 0.0)])
def test_success_is_the_score_compared_with_the_threshold_of_the_evaluation(warmed, threshold, share):
    """The reward does not define success."""
    config, task = config_of(), echo_task(score=lambda trajectory, row: 0.5)
    config.evaluation.success_threshold = threshold
    config.reward.components = {"environment": -3.0}
    assert success_of(config, task, connected(config, task), *load_model(config, warmed.path)) == share


# -- models of Hugging Face ------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path, chatml_tokenizer):
    """Folder of a model with random weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(chatml_tokenizer), max_position_embeddings=256, initializer_range=0.3,
                    eos_token_id=chatml_tokenizer.eos_token_id, pad_token_id=chatml_tokenizer.pad_token_id, **sizes)
    )  # fmt: skip
    folder = tmp_path / "llama"
    model.save_pretrained(folder)
    chatml_tokenizer.save_pretrained(folder)
    return folder


def hf(folder, **warm):
    return config_of({"name": "hf", "path": str(folder), "device": "cpu"}, success_band=[0.33, 0.5], **warm)


def never(*words):
    raise AssertionError("no update is needed")


@pytest.mark.parametrize("share", [0.33, 0.4, 0.5])
def test_a_model_inside_the_band_is_used_unchanged(llama, share):
    measure = Script(share)
    path, result = warm_start(hf(llama), echo_task(), measure, never)
    assert path == str(llama) and len(measure.policies) == 1
    assert result == WarmStartResult(share, 4, 0, (0.33, 0.5), path=str(llama))
    assert same(measure.policies[0], AutoModelForCausalLM.from_pretrained(llama).state_dict())


def test_the_result_for_a_model_inside_the_band_is_cached(llama):
    first = warm_start(hf(llama), echo_task(), Script(0.4))
    path, again = warm_start(hf(llama), echo_task(), Script())
    assert path == first[0] == again.path and (again.success, again.steps) == (0.4, 0)


def test_changed_weights_in_the_folder_are_measured_again(llama):
    warm_start(hf(llama), echo_task(), Script(0.4))
    weights = llama / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    measure = Script(0.45)
    assert warm_start(hf(llama), echo_task(), measure)[1].success == 0.45 and len(measure.policies) == 1


def test_a_model_below_the_band_is_fine_tuned_and_cached(llama, cache):
    measure, before = Script(0.1, 0.2, 0.4), digest(llama)
    path, result = warm_start(hf(llama, check_every=3), echo_task(), measure)
    assert Path(path).is_relative_to(cache) and digest(llama) == before, "the folder that was named is left alone"
    assert (result.success, result.steps, result.path) == (0.4, 6, None)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded) is LlamaForCausalLM and same(loaded.state_dict(), measure.policies[-1])
    original = measure.policies[0]
    assert all(not torch.equal(value, original[name]) for name, value in loaded.state_dict().items())
    text = "<|im_start|>user\nhello 12<|im_end|>"
    assert AutoTokenizer.from_pretrained(path).encode(text) == AutoTokenizer.from_pretrained(llama).encode(text)
    assert warm_start(hf(llama, check_every=3), echo_task(), Script(), never)[0] == path


def test_a_run_measures_the_model_only_if_the_warm_start_is_enabled(llama):
    """The run is real. Random texts rarely contain the digit, and every band from 0 accepts that."""
    config = hf(llama)
    config.model.warm_start.success_band = (0.0, 1.0)
    path, result = started(config, echo_task(), never)
    assert path == llama and result.steps == 0 and 0 <= result.success < 1
    config.model.warm_start.enabled = False
    assert started(config, echo_task(), never) == (llama, None)


def test_on_step_is_called_after_every_update(llama):
    seen, numbers = [], count(1)
    warm_start(hf(llama, check_every=2), echo_task(), Script(0.0, 0.1, 0.4), lambda *words: seen.append(words))
    assert [step for step, _ in seen] == [next(numbers) for _ in seen] and len(seen) == 4
    assert [success for _, success in seen[2:]] == [0.1, 0.1]
