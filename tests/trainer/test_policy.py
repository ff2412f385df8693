"""The policy gives the same log-probs, weights and exports if it is plain, sharded or adapted."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

from ranks import run_ranks
from sharded_models import adamw, make_batches, make_lm, make_model, without_tokens

from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.sharding import shard
from mtrl.models.lora import without_adapters
from mtrl.trainer.update.policy import Policy

KINDS = ("plain", "tied", "lora")


class Tokenizer:
    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def world():
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())


def exported(folder):
    """Return the bytes of every file, including those in `adapter/`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def learn(policy, batches, anchors):
    """Make one step that computes the model without its adapters between forward and backward."""
    optimizer = adamw(policy.model)
    for batch in batches:
        logprobs, _, _ = policy.logprobs_beside(batch)
        with anchors():
            reference = policy.all_logprobs([batch])[0]
        (batch.weights * (logprobs - reference).square() - batch.weights * batch.advantages * logprobs).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def on_rank(rank, folder):
    """Return the results of each kind of policy on this rank."""
    found = {}
    for kind in KINDS:
        policy = Policy(shard(make_model(kind), FsdpConfig(), world()), Tokenizer())
        batches = make_batches()
        before = policy.all_logprobs(batches)
        freed = all(isinstance(p, DTensor) for p in policy.model.parameters())
        learn(policy, batches[rank :: world().size], reference_of(policy))
        policy.export(folder / kind)
        after = policy.all_logprobs(batches)
        checkpoint = {name: value.clone() for name, value in policy.state().items()}
        policy.load({name: torch.zeros_like(value) for name, value in checkpoint.items()})
        emptied = policy.all_logprobs(batches[:1])[0]  # the root's weights must not be those from before the load
        policy.load(checkpoint)
        found[kind] = {
            "freed": freed,
            "before": before,
            "after": after,
            "emptied": emptied,
            "restored": policy.all_logprobs(batches),
            "weights": policy.weights(),
            "parameters": policy.parameters,
            "held": sum(value.to_local().numel() for value in policy.state().values()),
        }
        chunked = Policy(policy.model, None, max_logits=4 * 53)
        found[kind]["chunked"] = chunked.all_logprobs([without_tokens(b) for b in batches] if rank else batches)
    return found


def reference_of(policy):
    """Return the policy without its adapters, if it has any."""
    return lambda: without_adapters(policy.model) if policy.adapted else torch.no_grad()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    return folder, run_ranks(2, on_rank, tmp_path_factory.mktemp("ranks"), folder)


@pytest.mark.xdist_group("policy_ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_policy_does_what_a_plain_one_does(two_ranks, kind, tmp_path):
    folder, ranks = two_ranks
    policy, batches = Policy(make_model(kind), Tokenizer()), make_batches()
    before = policy.all_logprobs(batches)
    learn(policy, batches, reference_of(policy))
    after, weights = policy.all_logprobs(batches), policy.weights()
    assert ranks[1][kind]["weights"] is None and ranks[0][kind]["weights"].keys() == weights.keys()
    torch.testing.assert_close(ranks[0][kind]["weights"], weights, rtol=1e-5, atol=1e-5)
    for found in (rank[kind] for rank in ranks):
        torch.testing.assert_close(found["before"], before, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["after"], after, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(found["restored"], found["after"], strict=True))
        assert found["freed"]
        assert found["parameters"] == policy.parameters
        assert not torch.equal(found["emptied"], found["after"][0])
    assert sum(rank[kind]["held"] for rank in ranks) == sum(value.numel() for value in weights.values())
    torch.testing.assert_close(ranks[0][kind]["chunked"], after, rtol=1e-4, atol=1e-4)
    # The export equals that of a plain policy with these weights, byte for byte.
    policy.load(ranks[0][kind]["weights"])
    policy.export(tmp_path / kind)
    assert exported(folder / kind) == exported(tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_model_that_was_trained(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    policy, batches = Policy(make_model(kind), Tokenizer()), make_batches(1)
    policy.export(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    found, expected = Policy(loaded.eval(), None).all_logprobs(batches), policy.all_logprobs(batches)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_with_adapters_only_the_adapters_are_stored_and_sent():
    policy = Policy(make_model("lora"), None)
    assert policy.adapted and not Policy(make_lm(), None).adapted
    assert policy.state().keys() == policy.weights().keys() and all("lora_" in name for name in policy.state())
    before = policy.all_logprobs(make_batches(1))[0]
    policy.load({name: torch.zeros_like(value) for name, value in policy.state().items()})
    plain = Policy(make_lm(), None).all_logprobs(make_batches(1))[0]
    assert torch.allclose(policy.all_logprobs(make_batches(1))[0], plain) and not torch.allclose(before, plain)


def test_state_and_weights_are_copies():
    policy = Policy(make_lm(tied=True), None)
    state, weights = policy.state(), policy.weights()
    copies = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1)
    assert all(torch.equal(state[name], value) and torch.equal(weights[name], value) for name, value in copies.items())
    policy.load(state)
    assert torch.equal(policy.model.lm_head.weight, copies["model.embed_tokens.weight"])


def test_a_batch_without_sampled_tokens_has_gradients_of_0():
    model = make_lm()
    logprobs, entropy = Policy(model, None).logprobs(without_tokens(make_batches(1)[0]))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
