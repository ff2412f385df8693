"""A causal LM of a few lines, with which processes of engines start faster than with the models of Transformers."""

import math
from types import SimpleNamespace

import torch
from torch import nn

VOCABULARY = 40
POSITIONS = 4096


class ToyConfig(SimpleNamespace):
    def get_text_config(self):
        return self


class ToyLM(nn.Module):
    """A model of two layers of attention with one head. The output head is tied to the embedding."""

    def __init__(self, seed=0, size=16, layers=2):
        super().__init__()
        self.config = ToyConfig(
            num_hidden_layers=layers, num_attention_heads=1, hidden_size=size, vocab_size=VOCABULARY,
            _attn_implementation="eager", hidden_act="silu",
        )  # fmt: skip
        self.embed = nn.Embedding(VOCABULARY, size)
        self.positions = nn.Embedding(POSITIONS, size)
        self.qkv = nn.ModuleList(nn.Linear(size, 3 * size) for _ in range(layers))
        self.head = nn.Linear(size, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.eval()

    @property
    def dtype(self):
        return self.embed.weight.dtype

    @property
    def device(self):
        return self.embed.weight.device

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
            attention_mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        x = self.embed(input_ids) + self.positions(position_ids)
        for i, layer in enumerate(self.qkv):
            q, k, v = layer(x)[:, None].chunk(3, -1)
            if past_key_values is not None:
                k, v = past_key_values.layers[i].update(k, v)
            scores = q @ k.transpose(-1, -2) / math.sqrt(x.shape[-1]) + attention_mask
            x = x + (scores.softmax(-1) @ v)[:, 0]
        return SimpleNamespace(logits=self.head(x))


class Unpicklable(ToyLM):
    def __reduce__(self):
        raise TypeError("cannot pickle a toy that is bolted down")


class Refused(ToyLM):
    """A model that the engine cannot run, which it detects in its process."""

    def __init__(self):
        super().__init__()
        self.config._attn_implementation = "flash"


class Stillborn(ToyLM):
    """A model that kills its process."""

    def __reduce__(self):
        return _exit, (7,)


def _exit(status):
    import os

    os._exit(status)


def weights_of(version):
    """Return the weights of policy `version`, without duplicates of tied ones."""
    state = ToyLM(seed=version).state_dict()
    del state["head.weight"]
    return state


def logprobs_of(version, context, token_ids, models={}):  # noqa: B006 - a cache
    """Return the log-probs [len(token_ids)] of tokens after `context`, by one forward pass of policy `version`."""
    model = models.setdefault(version, ToyLM(seed=version))
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *token_ids]])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)


def check_generation(prompt, generation):
    """Check that every token has the log-prob that the policy of its span gives to it after all tokens before it."""
    start = 0
    for version, count in generation.version_spans:
        ids = generation.token_ids[: start + count]
        expected = logprobs_of(version, prompt, ids)[start:] if ids else []
        got = torch.tensor(generation.logprobs[start : start + count])
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        start += count
    assert start == len(generation.token_ids) == len(generation.logprobs)
