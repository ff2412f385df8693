"""The gradient of episodes whose context is folded, and the advantages of their turns.

The reference knows nothing of samples: each turn alone, after the prompt that the engine received.
"""

from dataclasses import replace

import pytest
import torch
from alone import updater_of
from test_gradients import EXACT, Capture, assert_same
from transformers import GPT2Config, GPT2LMHeadModel

from mtrl.algorithms.advantages import turn_advantages
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import Config
from mtrl.rollout.folding import KeepLast, Summarise
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.update.policy import Policy
from mtrl.types import Group
from tests.rollout.folded import ROW, play


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    """A model that computes in float64 throughout."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": len(tiny_tokenizer), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
        return GPT2LMHeadModel(config).eval().double()


def played_group(codec, fold):
    """Return two episodes with different rewards, and the calls of their turns."""
    played = [play(codec, fold, turns=4, index=index) for index in (0, 1)]
    for turn, reward in zip(played[1].trajectory.environment_turns, (0.25, 2.0, -1.0, 0.0), strict=True):
        turn.reward = reward
    return Group("g", ROW, [each.trajectory for each in played]), [each.calls for each in played]


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize("fold", [KeepLast(40, 1), Summarise(40)], ids=["keep_last", "summarise"])
def test_gradient_and_advantages_of_a_folded_episode(model, tiny_codec, tmp_path, fold, credit):
    algorithm = AlgorithmConfig(
        advantage_method="dr_grpo", credit=credit, gamma=0.5, loss_reduction="token_mean", loss_anchor="old"
    )
    group, calls = played_group(tiny_codec, fold)
    (advantages,) = turn_advantages([group], algorithm)
    (whole,) = turn_advantages([played_group(tiny_codec, None)[0]], algorithm)
    samples = group_samples(group, advantages)
    assert len(samples) > 2 and len({sample.trajectory for sample in samples}) == 2
    for trajectory, own, expected in zip(group.trajectories, advantages, whole, strict=True):
        received = [a for turn, a in zip(trajectory.turns, own, strict=True) if not turn.is_summary]
        assert received == expected, "a fold changes no advantage"
        pairs = zip(trajectory.turns, own, own[1:], strict=False)
        assert all(a == after for turn, a, after in pairs if turn.is_summary), "a summary has that of the next turn"

    losses = []
    for made, own in zip(calls, advantages, strict=True):
        for (prompt, ids, _), advantage in zip(made, own, strict=True):
            logps = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            losses += (-advantage * logps.gather(1, torch.tensor(ids)[:, None])).flatten()
    weight = torch.tensor(1 / len(losses), dtype=torch.float32).double()  # the trainer rounds the weights of tokens
    expected = torch.autograd.grad(weight * torch.stack(losses).sum(), list(model.parameters()))

    config = Config(run_dir="unused", algorithm=algorithm)
    for packing in (False, True):
        config.trainer = replace(config.trainer, packing=packing)
        optimizer = Capture(model, config.trainer.optimizer, 10)
        updater_of(config, Policy(model, None), None, optimizer, tmp_path / "dump").run(samples, 0)
        assert_same(optimizer.grads, expected, EXACT)
