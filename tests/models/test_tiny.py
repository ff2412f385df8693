"""The tiny policy: its random model and its tokenizer are reproducible, and are saved completely."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtrl.config.model_schema import TinyConfig
from mtrl.models.renderer import TinyRenderer, make_renderer
from mtrl.models.tiny import make_model, save, train_tokenizer


def test_the_model_depends_only_on_sizes_and_seed(tiny_recipe, tiny_tokenizer):
    torch.manual_seed(123)  # a state as after other random numbers
    expected = torch.rand(3)
    torch.manual_seed(123)
    one, same, other = (make_model(tiny_recipe, tiny_tokenizer, seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected), "the global random state is unchanged"
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_model_has_less_than_a_million_parameters_and_heads_that_vllm_accepts(tiny_tokenizer):
    """On a CPU, vLLM needs a head dimension of at least 32."""
    model = make_model(TinyConfig(), tiny_tokenizer, 0)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model.config.head_dim >= 32


def test_saving_again_replaces_the_folder(tiny_model, tiny_tokenizer, tmp_path):
    save(tiny_model, tiny_tokenizer, tmp_path / "out")
    (tmp_path / "out" / "stale").touch()
    save(tiny_model, tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "stale").exists() and (tmp_path / "out" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_saved_model_gives_the_same_logits(tiny_model, tiny_tokenizer, tmp_path):
    save(tiny_model, tiny_tokenizer, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(make_renderer(tokenizer)) is TinyRenderer
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([tokenizer.encode("train wants 7, number 7")])
    assert ids.tolist() == [tiny_tokenizer.encode("train wants 7, number 7")]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tiny_model(ids).logits)
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == tiny_tokenizer.eos_token_id


# -- its tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    talk = [
        [{"role": "user", "content": "add 1234567 and 1234567"}, {"role": "assistant", "content": "<say>2469134</say>"}]
    ]
    return train_tokenizer(talk * 50, 400, ("<say>", "</say>"))


@pytest.mark.parametrize("number", ["1234567", "2469134", " 12", "x1234567y", "3.14", "-12"])
def test_digits_stay_single(tokenizer, number):
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode(number)]
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in number if c.isdigit()]


def test_tags_and_roles_are_single_tokens(tokenizer):
    for text in ("<say>", "</say>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"):
        assert len(tokenizer.encode(text)) == 1
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(f"1{text}2")) == ["1", text, "2"]


def test_tags_are_text_and_roles_are_not(tokenizer):
    """The text for the environment contains tags, but no role markers."""
    ids = tokenizer.encode("<|assistant|><say>1</say><|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<say>1</say>"


@pytest.mark.parametrize("letter", ["x", " "])
def test_a_long_run_is_trained_in_pieces(letter):
    """As one word, 100,000 letters take half a minute, and twice as many four times as long. The tokenizer has no
    limit."""
    text = f"see {letter * 3_000} now"
    tokenizer = train_tokenizer([[{"role": "user", "content": text}]] * 2, 400)
    assert 256 < max(map(len, tokenizer.get_vocab())) <= 501, "a space and a piece"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n c", "é 漢 🙂", "\t<say> x </say>\r\n", "\x00\x7f"])
def test_any_text_is_decoded_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_frequent_words_are_merged(tokenizer):
    assert len(tokenizer.encode(" and")) == 1 and len(tokenizer) <= 400
