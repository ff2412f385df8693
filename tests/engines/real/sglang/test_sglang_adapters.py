"""LoRA adapters of the trainer on a real SGLang server, in the trainer's own format."""

import asyncio
import random

import pytest
from engine_model import CONTEXT, PARITY, load_model, reference_logprobs, worst
from sglang_policy import turn_request

from mtrl.engines.server.server_api import ServerRefusedError

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.rare]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapter(folder, out, seed):
    """Return a model with adapters that change its outputs, saved in `out` as peft does."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(load_model(folder), config).eval()
        for name, value in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.3)
    model.save_pretrained(out)
    return model


def request(prompt, adapter, tokens=24):
    plain = turn_request(prompt, tokens)
    return plain.__class__(plain.request_id, plain.prompt, plain.sampling, plain.max_tokens, adapter=adapter)


@pytest.fixture(scope="module")
def server(serving, tied_model):
    return serving("sglang", tied_model, max_lora_rank=4)


def distance(model, prompt, turn):
    return worst(reference_logprobs(model, prompt, turn.token_ids), turn.logprobs)


def test_concurrent_adapters_sample_as_the_trainer_does(server, tied_model, tmp_path, tiny_tokenizer):
    rng = random.Random(0)
    prompt = [rng.randrange(5, len(tiny_tokenizer)) for _ in range(30)]
    first, second = (with_adapter(tied_model, tmp_path / name, seed) for seed, name in enumerate(("one", "two")))

    async def scenario(api):
        await api.load_adapter("policy-1", str(tmp_path / "one"))
        running = asyncio.create_task(api.generate(request(prompt, "policy-1", CONTEXT - 100)))
        while not (await api.waiting())[0]:
            await asyncio.sleep(0.01)
        await api.load_adapter("policy-2", str(tmp_path / "two"))  # while turns run, and without a pause
        newest = await api.generate(request(prompt, "policy-2"))
        again = await api.generate(request(prompt, "policy-2"))
        without = await api.generate(request(prompt, None))
        with pytest.raises(ServerRefusedError, match="already loaded"):
            await api.load_adapter("policy-2", str(tmp_path / "two"))
        with pytest.raises(ServerRefusedError, match="400"):
            await api.load_adapter("policy-3", str(tmp_path / "nowhere"))
        with pytest.raises(ServerRefusedError, match="does not exist"):
            await api.drop_adapter("policy-9")
        oldest = await running
        await api.drop_adapter("policy-1")
        assert await api.is_ready()
        return oldest, newest, again, without

    oldest, newest, again, without = server.ask(scenario, 300)
    assert distance(first, prompt, oldest) < PARITY < distance(load_model(tied_model), prompt, oldest)
    assert distance(second, prompt, newest) < PARITY and distance(second, prompt, again) < PARITY
    assert distance(load_model(tied_model), prompt, without) < PARITY
    # Keys and values are shared by the turns of one adapter, and by no others.
    assert newest.cached_tokens == 0 and again.cached_tokens == len(prompt) - 1
