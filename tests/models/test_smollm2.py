"""`model=smollm2_135m`: a real language model, from a GGUF file of a Python package."""

import asyncio
import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtrl.command.compose import compose
from mtrl.doctor.architecture import find, table
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.models.gguf import as_folder
from mtrl.models.renderer import TemplateRenderer, make_renderer
from mtrl.models.tiny import save
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.trainer.loading import load_model, load_shape
from tests import forked
from tests.models.gguf_files import SMOLLM2, real_model

# One worker runs these tests, because the conversion takes seconds and half a gigabyte.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def config():
    return compose(["experiment=gsm8k", "model=smollm2_135m"])


@pytest.fixture(scope="module")
def folder():
    """The converted model; the other tests find it in the cache."""
    return Path(as_folder(real_model(), "model.path"))


@pytest.fixture(scope="module")
def loaded(folder, config):
    torch.set_num_threads(1)
    return load_model(config, config.model.path)


@pytest.fixture(scope="module")
def shallow(loaded, tmp_path_factory):
    """A folder of the model with two of its thirty layers, which trains in a quarter of the time."""
    model, tokenizer = copy.deepcopy(loaded[0]), loaded[1]
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    folder = tmp_path_factory.mktemp("shallow") / "model"
    save(model, tokenizer, folder)
    return folder


def test_the_word_names_the_file_and_its_learning_rate(config):
    assert config.model.path == SMOLLM2 and config.trainer.optimizer.lr == 1e-5
    assert compose(["experiment=gsm8k"]).trainer.optimizer.lr == 4e-4


@pytest.mark.ci
def test_its_size_is_that_of_the_table(loaded):
    model, _ = loaded
    fields = table()[SMOLLM2]
    assert sum(p.numel() for p in model.parameters()) == fields["parameters"] == find(SMOLLM2).parameters
    assert {name: getattr(model.config, name) for name in fields if name != "parameters"} == {
        name: value for name, value in fields.items() if name != "parameters"
    }


def test_text_is_split_as_in_its_training(loaded):
    """Digits are tokens of their own, and the spaces before a digit one token, as in indented code."""
    _, tokenizer = loaded
    assert tokenizer.tokenize("x =  12\n\n3 4") == ["x", "Ġ=", "ĠĠ", "1", "2", "ĊĊ", "3", "Ġ", "4"]
    text = "Zoë's  café\n\n\t日本 1,234.5 <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_knows_the_capital_of_france(loaded):
    model, tokenizer = loaded
    renderer = make_renderer(tokenizer)
    assert type(renderer) is TemplateRenderer
    codec = Codec(tokenizer, renderer)
    conversation = Conversation(codec, FRANCE)
    sampling = SamplingParams(max_generate_length=20, temperature=0.0, stop_token_ids=codec.stop_token_ids)

    async def answer():
        engine = LocalEngine(model, tokenizer, max_num_seqs=1, max_context_length=256)
        try:
            return await engine.generate("a", conversation.prompt, sampling)
        finally:
            await engine.close()

    turn = conversation.add_action(asyncio.run(answer()))
    assert "Paris" in turn.text and turn.action_ids[-1] == tokenizer.eos_token_id


PEAK = """
import torch
import transformers.models.llama.modeling_llama
from mtrl.command.compose import compose
from mtrl.trainer.loading import load_model

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

torch.set_num_threads(1)
config = compose(["experiment=gsm8k", "model=smollm2_135m"])
before = peak()
model, _ = load_model(config, config.model.path)
with torch.no_grad():
    model(torch.tensor([[1, 2, 3]]))
weights = sum(p.numel() for p in model.parameters()) * 4
print((peak() - before) / weights)
"""


def test_loading_takes_less_memory_than_two_copies_of_the_weights(folder):
    done = forked.run([sys.executable, "-c", PEAK], stdout=subprocess.PIPE, text=True, check=True)
    copies = float(done.stdout.split()[-1])
    print(f"loading and one forward pass: {copies:.2f} copies of the weights")
    assert copies < 2


def program(*words, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


SMALL = [
    "debug=fast",
    "trainer.threads=1",
    "trainer.checkpoint.keep_last=1",
    "trainer.prompts_per_step=1",
    "model.warm_start.success_band=[0.0,1.0]",
    "model.warm_start.episodes=1",
    "generator.max_turns=2",
    "generator.sampling_params.max_generate_length=8",
    "data.max_test_rows=1",
    "evaluation.rows=1",
    "evaluation.sampled_rows=0",
    "evaluation.every_steps=2",
    "evaluation.before_train=false",
    "preflight.at_start=none",
    "diagnosis.live=none",
    "tracker.plots=false",
]


def test_it_trains_resumes_exports_and_is_evaluated(shallow, tmp_path):
    command = ["mtrl.main", "experiment=gsm8k_smollm2", f"model.path={shallow}", *SMALL, "run_dir=run"]
    program(*command, "trainer.max_steps=1", cwd=tmp_path)
    program(*command, "trainer.max_steps=2", "resume=latest", cwd=tmp_path)
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    program("mtrl.evaluate", "run", "evaluation.compare=[base]", "evaluation.rows=1", "trainer.threads=1", cwd=tmp_path)
    shape, tokenizer = load_shape(compose([]), str(run / "export"))
    assert shape.model_type == "llama" and len(tokenizer) == shape.vocab_size
    sizes = [(path / "model.safetensors").stat().st_size for path in (run / "export", shallow)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.001)
    shutil.rmtree(run)  # hundreds of megabytes
