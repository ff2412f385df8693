"""A real vLLM server that takes adapters, its model with a head of its own: adapters, and whole weights under them."""

import asyncio

import pytest
from engine_model import PARITY, changed, load_model, named_weights, reference_logprobs, worst
from peft import LoraConfig, get_peft_model
from vllm_weights import WAYS, update

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerRefusedError, TurnRequest

pytestmark = [pytest.mark.slow, pytest.mark.rare]

PROMPT = list(range(20, 84))
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def server(serving, untied_model):
    return serving("vllm", untied_model, max_lora_rank=4, sync_timeout=60.0, request_timeout=90.0)


def adapted(model, seed: int):
    """The model with adapters of rank 4 that change its outputs."""
    import torch

    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=MATRICES)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return peft


def turn(name: str, adapter: str | None) -> TurnRequest:
    return TurnRequest(name, PROMPT, SamplingParams(seed=4), 32, None, adapter)


def test_each_turn_is_sampled_by_its_adapter(server, untied_model, tmp_path):
    plain = load_model(untied_model)
    policies = {f"policy-{seed}": adapted(load_model(untied_model), seed) for seed in (1, 2)}
    for name, policy in policies.items():
        policy.save_pretrained(tmp_path / name)

    async def act(api):
        for name in policies:
            await api.load_adapter(name, str(tmp_path / name))
        requested = (api.generate(turn(f"a-{name}", name)) for name in (*policies, None))
        found = await asyncio.gather(*requested)
        await api.drop_adapter("policy-1")
        for wrong in (
            api.generate(turn("a-gone", "policy-1")),
            api.drop_adapter("policy-1"),
            api.load_adapter("x", str(tmp_path / "nothing")),
        ):
            with pytest.raises(ServerRefusedError, match=r"does not exist|cannot be found|No adapter found"):
                await wrong
        return found

    for policy, generation in zip((*policies.values(), plain), server.ask(act), strict=True):
        expected = reference_logprobs(policy, PROMPT, generation.token_ids)
        assert worst(generation.logprobs, expected) < PARITY


@pytest.mark.parametrize("way", list(WAYS))
def test_full_weights_reach_a_model_with_adapters(server, untied_model, way):
    version = 1 + list(WAYS).index(way)
    model = changed(load_model(untied_model), version)

    async def act(api):
        await update(api, WAYS[way], named_weights(model), version)
        return await api.generate(turn(f"whole-{way}", None))

    generation = server.ask(act)
    assert generation.version_spans == [(version, 32)]
    assert worst(generation.logprobs, reference_logprobs(model, PROMPT, generation.token_ids)) < PARITY
