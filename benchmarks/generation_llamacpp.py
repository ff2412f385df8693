"""A sampler of llama.cpp, by the Python package `llama-cpp-python`, for `generation.py`.

All trajectories are sequences of one context and take their turns together, and keys and values stay from turn to turn.
A token is drawn by llama.cpp's own sampler from the whole vocabulary; no log-prob is computed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from generation_samplers import Wave
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 2048
"""Maximum number of tokens of one forward pass, llama.cpp's default."""
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of the parts of a layer of Qwen3 in a GGUF file, by those of Transformers."""

Token = tuple[int, int, int, bool]
"""Id, position, sequence, and whether the logits after it are needed."""


class LlamaCppSampler:
    """See `generation_samplers.Sampler`.

    Args:
        folder: folder of a Qwen3 model; the GGUF file is written beside it, with matrices in the model's dtype.
        context: number of tokens of a whole conversation.
    """

    def __init__(self, folder: Path, trajectories: int, context: int, threads: int):
        try:
            import llama_cpp
        except ImportError as error:
            raise SystemExit(f"llamacpp needs llama-cpp-python: pip install llama-cpp-python gguf ({error})") from None
        self.lib: Any = llama_cpp
        self.silence = self.lib.llama_log_callback(lambda *_: None)  # llama.cpp calls it as long as it runs
        self.lib.llama_log_set(self.silence, None)
        file = folder.parent / "policy.gguf"
        if not file.exists():
            write_gguf(folder, file)
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(os.fsencode(file), self.lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {file.name}; see above")
        settings = self.lib.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = trajectories * (context + 256), trajectories
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, settings)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context of this size")
        self.vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.batch = self.lib.llama_batch_init(BATCH, 0, 1)
        self.samplers = [self.lib.llama_sampler_init_dist(seed) for seed in range(trajectories)]

    async def sample(self, wave: Wave) -> None:
        """See `generation_samplers.Sampler`."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        lengths, newest = [0] * len(wave.prompts), [0] * len(wave.prompts)
        texts = wave.prompts
        for turn in range(len(wave.observations) + 1):
            if turn:  # the last token of the last turn is read with the observation
                texts = [[last, *seen] for last, seen in zip(newest, wave.observations[turn - 1], strict=True)]
            newest = self._read(texts, lengths)
            for _ in range(wave.tokens - 1):
                newest = self._read([[token] for token in newest], lengths)

    def _read(self, texts: Sequence[Sequence[int]], lengths: list[int]) -> list[int]:
        """Read more tokens of each sequence, add them to `lengths`, and return the next token of each."""
        tokens = [
            (token, lengths[i] + k, i, k == len(text) - 1)
            for i, text in enumerate(texts)
            for k, token in enumerate(text)
        ]
        sampled: list[int] = []
        for begin in range(0, len(tokens), BATCH):
            part = tokens[begin : begin + BATCH]
            self._decode(part)
            for place, (_, _, sequence, is_last) in enumerate(part):
                if is_last:
                    sampled.append(self.lib.llama_sampler_sample(self.samplers[sequence], self.context, place))
        for i, text in enumerate(texts):
            lengths[i] += len(text)
        if not all(0 <= token < self.vocabulary for token in sampled):
            raise SystemExit("llama.cpp sampled an id outside of the vocabulary")
        return sampled

    def _decode(self, part: Sequence[Token]) -> None:
        batch = self.batch
        batch.n_tokens = len(part)
        for place, (token, position, sequence, is_last) in enumerate(part):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, is_last
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        if self.lib.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama.cpp cannot compute this batch")

    async def close(self) -> None:
        """Free the memory of llama.cpp."""
        for sampler in self.samplers:
            self.lib.llama_sampler_free(sampler)
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


def write_gguf(folder: Path, file: Path) -> None:
    """Write a Qwen3 model with tied embeddings as a GGUF file: matrices in the model's dtype, and norms in float32."""
    import gguf

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), model.config
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")  # texts are never read or written
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(config.vocab_size)))
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["a b"])  # a file needs one
    for name, value in model.named_parameters():
        matrix = value.detach()
        if matrix.dim() == 1 or matrix.dtype == torch.float32:
            writer.add_tensor(gguf_name(name), matrix.float().numpy())
        else:
            raw = matrix.view(torch.int16).numpy().view("uint8").reshape(matrix.shape[0], -1)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the name of a parameter of Transformers' Qwen3 in a GGUF file."""
    words = name.removesuffix(".weight").split(".")
    if words[1] == "layers":
        return f"blk.{words[2]}.{LAYER['.'.join(words[3:])]}.weight"
    return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[words[1]]
