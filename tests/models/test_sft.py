"""Supervised fine-tuning: the loss is on the assistant's tokens, and does not depend on micro-batches."""

import copy
import random
from collections import Counter

import pytest
import torch
import transformers as hf

from mtrl.errors import UserError
from mtrl.models import sft
from mtrl.models.renderer import make_renderer
from mtrl.models.sft import Example, MixedOptimizer, batches, by_length, fine_tune, to_example, update
from mtrl.rollout.conversation import Codec
from mtrl.types import Demonstration

EXAMPLES = [
    Example([1, 2, 3, 4, 5], [False, False, True, True, False]),
    Example([6, 7, 8], [False, True, True]),
    Example([9] * 12, [False] * 6 + [True] * 6),
]


class Recorder:
    """An optimiser that records gradients and changes no weight."""

    def __init__(self, model):
        self.model, self.scales = model, []

    def step(self, scale):
        self.scales.append(scale)
        self.gradients = [p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()


def train(model, examples, steps=1, **options):
    optimizer = Recorder(model)
    losses = fine_tune(model, lambda: examples, steps, optimizer, **options)
    return losses, optimizer


def test_an_example_marks_the_assistants_tokens(tiny_tokenizer):
    messages = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "34"}]
    example = to_example(make_renderer(tiny_tokenizer), Demonstration(messages))
    assert tiny_tokenizer.decode(example.ids) == "<|user|>12<|end|><|assistant|>34<|end|>"
    assert example.mask == [False] * 5 + [True] * 3


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_examples_work_with_every_renderer(chatml_tokenizer, name):
    messages = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "<think>\n\n</think>\n\n34"}]
    example = to_example(make_renderer(chatml_tokenizer, name), Demonstration(messages))
    marked = [i for i, mask in zip(example.ids, example.mask, strict=True) if mask]
    assert chatml_tokenizer.decode(marked).endswith("34<|im_end|>") and "user" not in chatml_tokenizer.decode(marked)


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_an_example_begins_with_the_prompt_of_training(chatml_tokenizer, name):
    """The tools of the environment are part of it."""
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "<think>\n\n</think>\n\n34"}]
    renderer = make_renderer(chatml_tokenizer, name)
    prompt = Codec(chatml_tokenizer, renderer).render(messages[:1], tools)
    example = to_example(renderer, Demonstration(messages, tools))
    assert example.ids[: len(prompt)] == prompt and "add" in chatml_tokenizer.decode(prompt)
    assert example.ids.index(example.ids[len(prompt)], len(prompt)) <= example.mask.index(True)


def test_the_loss_is_the_mean_over_the_assistants_tokens(make_tiny_model):
    model = make_tiny_model()
    (loss,), _ = train(model, EXAMPLES)
    nll = []
    for example in EXAMPLES:
        logprobs = torch.log_softmax(model(torch.tensor([example.ids])).logits[0], -1)
        nll += [-logprobs[i - 1, example.ids[i]].item() for i, mask in enumerate(example.mask) if mask]
    assert loss == pytest.approx(sum(nll) / len(nll), rel=1e-5)


def test_micro_batches_change_neither_loss_nor_gradients(make_tiny_model, monkeypatch):
    monkeypatch.setattr(sft, "MAX_GRAD_NORM", 1e9)
    model = make_tiny_model()
    (whole,), together = train(model, EXAMPLES, max_tokens=10_000)
    (parts,), apart = train(model, EXAMPLES, max_tokens=1)
    assert whole == pytest.approx(parts, rel=1e-5)
    for one, other in zip(together.gradients, apart.gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_logits_in_chunks_change_neither_loss_nor_gradients(make_tiny_model, monkeypatch):
    """With a large vocabulary, the logits of a micro-batch would take several times the memory of the weights."""
    whole, one = train(make_tiny_model(), EXAMPLES)
    monkeypatch.setattr(sft, "F", None)  # the plain loss is not called
    model, two = make_tiny_model(), Recorder(None)
    two.model = model
    assert update(model, EXAMPLES, two, max_logits=3 * model.config.vocab_size) == pytest.approx(whole[0], rel=1e-5)
    for a, b in zip(one.gradients, two.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_soft_capped_logits_are_trained_as_they_are_sampled():
    config = hf.Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.Gemma2ForCausalLM(config).eval()
    (loss,), _ = train(model, EXAMPLES[:1])
    logprobs = torch.log_softmax(model(torch.tensor([EXAMPLES[0].ids])).logits[0], -1)
    assert loss == pytest.approx(-(logprobs[1, 3] + logprobs[2, 4]).item() / 2, rel=1e-5)


def test_the_learning_rate_warms_up_and_decays_to_0(make_tiny_model):
    _, optimizer = train(make_tiny_model(), EXAMPLES, steps=8, warmup=4)
    assert optimizer.scales == pytest.approx([min(1, (i + 1) / 4) * (1 - i / 8) for i in range(8)])
    assert optimizer.scales[0] == 0.25


def test_an_update_trains_one_batch_at_a_scaled_learning_rate(make_tiny_model):
    """An update works in every mode of the model, and returns the loss before the update."""
    model = make_tiny_model()
    (loss,), _ = train(model, EXAMPLES)
    optimizer = Recorder(model)
    assert update(model.eval(), EXAMPLES, optimizer, 0.25) == pytest.approx(loss, rel=1e-6)
    assert optimizer.scales == [0.25] and model.training


@pytest.mark.parametrize("muon", [0.02, None])
def test_an_optimizer_continues_from_its_state(make_tiny_model, muon):
    """Two steps from a state are equal bit for bit, with the same or another optimizer."""
    model = make_tiny_model()
    optimizer = MixedOptimizer(model, muon, 1e-2)
    for _ in range(3):
        update(model, EXAMPLES, optimizer)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ends = []
    for chosen in (optimizer, MixedOptimizer(model, muon, 1e-2)):
        model.load_state_dict(weights)
        chosen.load_state_dict(copy.deepcopy(state))
        for _ in range(2):
            update(model, EXAMPLES, chosen, 0.5)
        ends.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in weights)
    assert any(not torch.equal(ends[0][name], weights[name]) for name in weights)


def test_an_update_without_a_finite_loss_is_refused(make_tiny_model):
    """A learning rate that is too high gives weights that are not numbers, and these were written as a model."""
    model = make_tiny_model()
    optimizer = MixedOptimizer(model, None, 1e30)
    with pytest.raises(UserError, match=r"fine-tuning has a loss of \S+ and a gradient norm of \S+; lower"):
        fine_tune(model, lambda: EXAMPLES, 5, optimizer, warmup=1)


def test_gradients_are_clipped(make_tiny_model, monkeypatch):
    monkeypatch.setattr(sft, "MAX_GRAD_NORM", 1e-3)
    _, optimizer = train(make_tiny_model(), EXAMPLES)
    norm = torch.stack([g.norm() for g in optimizer.gradients]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("muon", [0.02, None])
def test_every_weight_is_trained_by_one_optimizer(make_tiny_model, muon):
    model = make_tiny_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = MixedOptimizer(model, muon, 1e-2)
    owned = Counter(id(p) for part in optimizer.parts for group in part.param_groups for p in group["params"])
    assert owned == Counter(id(p) for p in model.parameters())
    kinds = {type(part).__name__ for part in optimizer.parts}
    assert kinds == ({"AdamW", "Muon"} if muon else {"AdamW"})
    losses = fine_tune(model, lambda: EXAMPLES, 25, optimizer, warmup=2)
    assert losses[-1] < 0.5 * losses[0] and not model.training
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert len(changed) == len(before)


def test_muon_does_not_train_embeddings():
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    adam, muon = MixedOptimizer(model, 0.02, 1e-3).parts
    embeddings = {id(model.transformer.wte.weight), id(model.transformer.wpe.weight)}
    assert embeddings <= {id(p) for p in adam.param_groups[0]["params"]}
    assert len(muon.param_groups[0]["params"]) == 4


def test_by_length_keeps_micro_batches_under_the_token_limit():
    rng = random.Random(0)
    examples = [Example([i] * rng.randint(1, 30), []) for i in range(50)]
    parts = by_length(examples, 60)
    assert Counter(e.ids[0] for part in parts for e in part) == Counter(range(50))
    assert all(len(part) * max(len(e.ids) for e in part) <= 60 for part in parts)
    assert len(parts) < 25
    assert [len(part) for part in by_length([Example([0] * 99, [])] * 2, 60)] == [1, 1], "long examples are separate"


def test_batches_draw_every_example_before_repeating_one():
    draw = batches([Example([i], []) for i in range(10)], 4, random.Random(0))
    drawn = [e.ids[0] for _ in range(10) for e in draw()]
    assert all(sorted(drawn[i : i + 10]) == list(range(10)) for i in range(0, 40, 10))
    assert drawn[:10] != drawn[10:20]
    assert len({e.ids[0] for e in batches([Example([i], []) for i in range(3)], 5, random.Random(0))()}) == 3
