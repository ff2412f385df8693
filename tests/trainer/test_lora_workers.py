"""Adapters (LoRA) in rollout workers with local engines: any number of workers gives the groups of one engine."""

import asyncio
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.engines.base import SamplingParams
from mtrl.engines.packed import pack, unpack
from mtrl.environments.factory import load_task
from mtrl.models.lora import LoraWeights, adapter_state, add_adapters
from mtrl.models.tiny import save
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.workers import WorkerRollouts, Workers
from mtrl.trainer.setup.workers import make_episodes
from tests.rollout.in_memory import InMemoryCluster

WORDS = [
    "model.lora_rank=3",
    "model.lora_alpha=6",
    "model.device=cpu",
    "generator.max_turns=2",
    "data.synthetic_train_rows=6",
    "data.synthetic_test_rows=2",
]


@pytest.fixture
def config(tmp_path):
    return OmegaConf.to_object(compose([*WORDS, f"run_dir={tmp_path}/run"]))


@pytest.fixture
def sample(config, tmp_path, make_tiny_model, tiny_tokenizer):
    """Function that samples groups with these adapters, by `count` workers; 0: by one engine in this process."""
    save(make_tiny_model(), tiny_tokenizer, tmp_path / "model")
    module = add_adapters(make_tiny_model(), config.model)
    apply_weights = replace(LoraWeights.of(module), base={})
    make = partial(make_episodes, config, str(tmp_path / "model"), apply_weights)
    rows = load_task(config).splits.train[:6]

    async def play(count, b):
        adapters = {name: value + (b if "lora_B" in name else 0) for name, value in adapter_state(module).items()}
        loop = make()
        engine, rollouts = loop.engine, Rollouts(loop, config.seed, 0.0)
        if count:
            loops = [pickle.loads(pickle.dumps(make))() for _ in range(count)]  # Transformers loads one at a time
            engine = Workers(InMemoryCluster(loops.pop, config.seed), count, 60.0)
            await engine.start()
            rollouts = WorkerRollouts(loop, config.seed, 0.0, workers=engine)
        await engine.load_weights(unpack(pack(adapters)), 1)
        groups = (await rollouts.collect("step1", rows, 2, SamplingParams(max_generate_length=12))).groups
        await engine.close()
        return [turn for group in groups for t in group.trajectories for turn in t.turns]

    return lambda count, b=0.3: asyncio.run(play(count, b))


def test_groups_of_adapters_are_those_of_one_engine(sample):
    alone, plain = sample(0), sample(0, 0.0)
    assert [turn.action_ids for turn in alone] != [turn.action_ids for turn in plain], "the adapters change the tokens"
    for count in (1, 3):
        turns = sample(count)
        assert [turn.action_ids for turn in turns] == [turn.action_ids for turn in alone]
        assert {version for turn in turns for version, _ in turn.version_spans} == {1}
        logprobs = [torch.tensor([value for turn in each for value in turn.action_logprobs]) for each in (turns, alone)]
        torch.testing.assert_close(*logprobs, atol=0.0 if count == 1 else 1e-4, rtol=0.0)
