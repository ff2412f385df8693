"""Log-probs of a model that FSDP2 shards over two ranks, of which only one computes in chunks."""

from functools import cache

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mtrl.errors import UserError
from mtrl.models.logprobs import token_logprobs
from mtrl.models.preparation import checkpoint_gradients
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.ci

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
CASES = ("plain", "tied", "soft cap", "recomputed", "resharded", "adapters", "nothing sampled on one rank")
TIMES = 2
"""Number of micro-batches."""


def make(case):
    torch.manual_seed(0)
    if case == "soft cap":
        return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.5)).double().eval()
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=case == "tied")).double().eval()
    if case == "recomputed":
        checkpoint_gradients(model, offload=True)
    if case == "adapters":
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).double()
    return model


def batch(case, rank, time):
    generator = torch.Generator().manual_seed(10 * rank + time)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.rand(3, 8, generator=generator) < 0.6
    return ids, mask & (rank == 0 or case != "nothing sampled on one rank")


def loss(model, case, rank, time, max_logits):
    ids, mask = batch(case, rank, time)
    targets = ids[:, 1:][mask]
    logprobs, entropy = token_logprobs(
        model, mask, targets, temperature=0.7, entropy_gradient=True, max_logits=max_logits, input_ids=ids[:, :-1],
        use_cache=False,
    )  # fmt: skip
    weights = torch.arange(len(targets), dtype=torch.float64).cos()
    return (weights * logprobs).sum() + 0.3 * entropy.sum()


def shard(model, reshard_root):
    """Shard layers and root, with summed gradients, as mtrl/distributed/sharding.py does."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in causal_lm.model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=reshard_root)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def gradients_of_rank(rank):
    """Return the whole gradients by case and name."""
    found = {}
    for case in CASES:
        model = shard(make(case), reshard_root=case == "resharded")
        for time in range(TIMES):
            # Rank 0 computes in chunks and rank 1 does not, except that both do for the last micro-batch.
            chunks = 3 * VOCABULARY if rank == 0 or time == TIMES - 1 else 2**27
            loss(model, case, rank, time, chunks).backward()
        named = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        found[case] = {name: gradient.full_tensor() for name, gradient in named}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("peft")
    return run_ranks(2, gradients_of_rank, tmp_path_factory.mktemp("ranks"))


@cache
def expected(case):
    model = make(case)
    for rank in range(2):
        for time in range(TIMES):
            loss(model, case, rank, time, 2**27).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_one_process(case, found):
    for gradients in (of_rank[case] for of_rank in found):
        assert gradients.keys() == expected(case).keys()
        for name, gradient in expected(case).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11)


def refused_by_rank(rank):
    """Return the error message for a model whose head is sharded separately."""
    from torch.distributed.fsdp import fully_shard

    model = make("plain")
    fully_shard(model.lm_head)
    fully_shard(model)
    loss(model, "plain", rank, 0, 2**27).backward()
    try:
        loss(model, "plain", rank, 0, 3 * VOCABULARY)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_separately_sharded_head_is_refused(tmp_path):
    for message in run_ranks(2, refused_by_rank, tmp_path):
        assert "the head or the body of the model was given to fully_shard" in message
