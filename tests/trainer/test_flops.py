"""FLOPs of models, compared with torch's count of executed operations, and peak FLOP/s of devices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mtrl.models.logits import logits_at
from mtrl.models.value_head import ValueModel
from mtrl.trainer.flops import PEAKS, ModelFlops, gpu_peak, model_flops, peak_flops

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
ROWS, LENGTH, SAMPLED = 2, 17, 5


def count(model, backward):
    """Count the FLOPs of log-probs at SAMPLED positions of each of ROWS sequences."""
    chosen = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    chosen[:, :SAMPLED] = True
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % SIZES["vocab_size"]
    with FlopCounterMode(display=False) as counter:
        logits = logits_at(model, chosen, input_ids=ids, use_cache=False)
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def attention(of):
    """Return the FLOPs of attention, forward, as it is executed: not halved by causality."""
    return 4 * of.width * len(of.windows) * ROWS * LENGTH**2


@pytest.mark.parametrize("tied", [True, False])
def test_counted_flops_equal_torchs_count(tied):
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    of, lengths = model_flops(model), [LENGTH] * ROWS
    assert (of.width, of.windows, of.head) == (32, (None,) * 3, 24 * 50)
    assert of.body == of.body_trained and of.head == of.head_trained
    assert of.forward(lengths, ROWS * SAMPLED) == count(model, False) - attention(of) / 2
    assert of.training(lengths, ROWS * SAMPLED) == count(model, True) - 3 * attention(of) / 2
    assert of.training(lengths, 10) == pytest.approx(3 * of.forward(lengths, 10))


def test_frozen_weights_have_no_weight_gradient():
    """As with adapters, frozen weights still propagate the gradient, except the lowest ones."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SIZES)), LoraConfig(r=2, target_modules="all-linear"))
    of = model_flops(model)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (of.body_trained, of.head_trained, of.head) == (adapters, 0, 24 * 50)
    counted = count(model, True) - 3 * attention(of) / 2
    assert of.training([LENGTH] * ROWS, ROWS * SAMPLED) == pytest.approx(counted, rel=0.05)


def test_flops_of_a_critic():
    policy = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    of = model_flops(ValueModel(policy))
    assert of.head == 0 and of.body == model_flops(policy).body + SIZES["hidden_size"]


def test_only_the_experts_that_a_token_is_routed_to_count():
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1}
    few, all_of_them = (
        model_flops(MixtralForCausalLM(MixtralConfig(**sizes | {"num_experts_per_tok": k}))) for k in (1, 4)
    )
    assert all_of_them.body - few.body == 3 * (3 * 3 * 24 * 40)  # layers x unused experts x their three matrices


def test_a_window_bounds_attention():
    layers = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 4}
    of = model_flops(Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, **layers)))
    assert of.windows == (None, 4, 4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(1, 300))
def test_attention_is_half_a_square_and_never_more_with_a_window(lengths, window):
    whole, cut = (ModelFlops(0, 0, 0, 0, 1, (reach,)) for reach in (None, window))
    assert whole.forward(lengths, 0) == pytest.approx(sum(2 * n * n for n in lengths))
    seen = sum(sum(min(i + 0.5, window) for i in range(n)) for n in lengths)  # token i sees i + 1/2
    assert cut.forward(lengths, 0) == pytest.approx(4 * seen)
    assert cut.forward(lengths, 0) <= whole.forward(lengths, 0)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_gpus_are_found_by_their_names(name, tflops):
    assert gpu_peak(name, torch.bfloat16) == gpu_peak(name, torch.float16) == tflops * 1e12
    assert gpu_peak(name, torch.float32) < tflops * 1e12
    assert gpu_peak(name, torch.int8) is None


def test_an_unknown_gpu_has_no_peak():
    assert gpu_peak("NVIDIA A10G", torch.bfloat16) is None  # must not match the A10, which is faster
    assert gpu_peak("NVIDIA Z9000", torch.bfloat16) is None


def test_the_most_specific_name_matches():
    for number, peak in enumerate(PEAKS):
        assert not [later for later in PEAKS[number + 1 :] if set(peak.words) <= set(later.words)]


def test_a_cpu_is_measured_once_without_random_numbers():
    state = torch.get_rng_state()
    first = peak_flops(torch.device("cpu"), torch.float32)
    assert first == peak_flops(torch.device("cpu"), torch.float32) and 1e6 < first < 1e15
    assert torch.equal(state, torch.get_rng_state())
    assert peak_flops(torch.device("meta"), torch.float32) is None
