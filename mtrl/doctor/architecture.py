"""The size of a model: its parameters, counted from the fields of its config.json. This module does not import
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mtrl.errors import UserError
from mtrl.utils.files import in_home

TABLE = Path(__file__).with_name("architectures.yaml")
DENSE = ("llama", "qwen2", "qwen3")
MIXTURES = {
    "gpt_oss": {},
    "qwen3_moe": {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
}
"""The names in config.json of a mixture's sizes, where they differ from those of `Architecture`."""
OF_MIXTURES = ("num_local_experts", "num_experts_per_tok")
EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""Values of the fields that say which layers have experts, if all have them."""


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder, named as in config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    head_dim: int
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    attention_bias: bool = False
    """Whether the linear layers of attention have biases. Those of qwen2 and gpt_oss always have the same ones."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> Architecture:
        """Build the architecture from the fields of a config.json; `where` names the file in errors.

        Raises:
            UserError: the model type is unknown, the model reads more than text, or a field is missing or no valid
                size.
        """
        if not isinstance(fields, Mapping):
            raise UserError(f"{where} has a config.json that is no mapping; correct it")
        kind = fields.get("model_type")
        if kind not in (*DENSE, *MIXTURES):
            known = ", ".join((*DENSE, *MIXTURES))
            raise UserError(f"{where} has the model_type {kind}, whose memory is not known here; known are {known}")
        if other := [name for name, value in EVERY_LAYER.items() if fields.get(name) not in (None, value)]:
            raise UserError(
                f"{where} has {other[0]}={fields[other[0]]}, so not every layer has experts, and the memory of such a "
                "model is not known here; plan it by hand"
            )
        if fields.get("text_config"):
            raise UserError(f"{where} reads more than text, and memory is worked out for text alone; plan it by hand")
        fields = fields | {own: fields.get(name, fields.get(own)) for own, name in MIXTURES.get(kind, {}).items()}
        heads = fields.get("num_attention_heads")
        given: dict[str, Any] = {
            "tie_word_embeddings": False,
            "num_key_value_heads": heads,
            "head_dim": _quotient(fields.get("hidden_size"), heads),
        } | {key: fields[key] for key in cls.__dataclass_fields__ if fields.get(key) is not None}
        needed = {field.name for field in dataclass_fields(cls) if field.default is MISSING}
        if missing := sorted(needed - given.keys()):
            raise UserError(f"{where} has no {missing[0]}; give the config.json of a causal LM")
        for name, value in given.items():
            kind_of_value = cls.__dataclass_fields__[name].type
            if kind_of_value == "int" and (type(value) is not int or value < (name not in OF_MIXTURES)):
                raise UserError(f"{where} has {name}={value}, which is no size; correct its config.json")
        return cls(**given)

    @property
    def queries(self) -> int:
        """Total width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Total width of all key heads, which is also that of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Input and output widths of the linear layers in one decoder layer that LoRA adapts, by name."""
        h, i = self.hidden_size, self.intermediate_size
        attention = {
            "q_proj": (h, self.queries),
            "k_proj": (h, self.keys),
            "v_proj": (h, self.keys),
            "o_proj": (self.queries, h),
        }
        if self.model_type in MIXTURES:  # experts are modules of their own, which get no adapters
            return attention
        return attention | {"gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

    @property
    def layer(self) -> int:
        """Number of parameters of one decoder layer."""
        h, q, kv = self.hidden_size, self.queries, self.keys
        matrices = sum(inputs * outputs for inputs, outputs in self.linear.values())
        norms = 2 * h
        if self.model_type == "qwen2":
            return matrices + norms + q + 2 * kv
        if self.attention_bias and self.model_type != "gpt_oss":
            matrices += q + 2 * kv + h
        if self.model_type in ("qwen3", "qwen3_moe"):
            return matrices + norms + 2 * self.head_dim + self.experts
        if self.model_type == "gpt_oss":
            biases, sinks = q + 2 * kv + h, self.num_attention_heads
            return matrices + norms + biases + sinks + self.experts
        return matrices + norms

    @property
    def experts(self) -> int:
        """Number of parameters of the experts and their router in one decoder layer; 0 in a dense model."""
        h, i = self.hidden_size, self.intermediate_size
        router_and_expert = h + 3 * h * i
        biases = 1 + 2 * i + h if self.model_type == "gpt_oss" else 0
        return self.num_local_experts * (router_and_expert + biases) if self.model_type in MIXTURES else 0

    @property
    def head(self) -> int:
        """Number of parameters of the output layer, tied or not."""
        return self.vocab_size * self.hidden_size

    @property
    def root(self) -> int:
        """Number of parameters outside of the layers: embedding, head, last norm. FSDP2 gathers them together."""
        return self.head * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_hidden_layers * self.layer + self.root

    @property
    def largest(self) -> int:
        """Number of parameters of the largest tensor, which is gathered whole when weights are sent to an engine."""
        experts = self.num_local_experts * self.hidden_size * 2 * self.intermediate_size
        return max(self.head, experts, *(inputs * outputs for inputs, outputs in self.linear.values()))

    def part(self, tensor: int, expert: int) -> Architecture:
        """Return the sizes of the part that one rank computes, where Transformers' plans divide matrices among `tensor`
        ranks and experts among `expert` ranks. For gpt_oss, `tensor` divides the embedding and the head only. The
        router, which is small and not divided, is counted with the experts."""
        sizes = {"vocab_size": -(-self.vocab_size // tensor), "num_local_experts": self.num_local_experts // expert}
        if self.model_type != "gpt_oss":
            heads = ("num_attention_heads", "num_key_value_heads")
            names = heads if self.model_type in MIXTURES else (*heads, "intermediate_size")
            sizes |= {name: -(-getattr(self, name) // tensor) for name in names}
        return replace(self, **sizes)

    def adapters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Return the number of parameters of LoRA adapters of this rank, for the layers that `chosen` selects."""
        chosen = self.chosen(targets).values()
        return self.num_hidden_layers * rank * sum(inputs + outputs for inputs, outputs in chosen)

    def chosen(self, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Return the layers of `linear` with whose name an entry of `targets` ends; all of them if `targets` is
        empty."""
        return {n: s for n, s in self.linear.items() if not targets or any(t.endswith(n) for t in targets)}

    def cached(self, size: int) -> int:
        """Return the bytes of the keys and values of one token, for numbers of `size` bytes."""
        return 2 * self.num_hidden_layers * self.keys * size


def _quotient(width: Any, heads: Any) -> int:
    """Return the default size of a head; 0, which is rejected later, if it cannot be computed."""
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else 0


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the models of `architectures.yaml` by their Hub names."""
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def find(path: str, key: str = "model.path") -> Architecture:
    """Return the architecture of a folder, from its config.json, or of a Hub name in the table. No network access is
    needed.

    Args:
        key: setting that names the model, for error messages.

    Raises:
        UserError: `path` is neither, or its config.json is invalid.
    """
    config = in_home(path) / "config.json"
    if config.is_file():
        try:
            fields = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{key}={path} has a config.json that cannot be read ({error}); correct it") from error
        return Architecture.of(fields, f"{key}={path}")
    if path in table():
        return Architecture.of(table()[path], f"{key}={path}")
    raise UserError(
        f"{key}={path} is neither a folder with a config.json nor one of the models whose sizes are known here "
        f"({', '.join(table())}); download it and name its folder"
    )
