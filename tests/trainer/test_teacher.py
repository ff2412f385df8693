"""Loading of a local teacher: its log-probs, its dtype, and the teachers that are refused."""

import pytest
import torch

from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.models.tiny import save, train_tokenizer
from mtrl.trainer.setup.teacher import teacher_model

OTHER_TEXT = [[{"role": "user", "content": "another text, which gives another vocabulary"}]]


def config_of(path, dtype=None):
    config = Config(run_dir="unused")
    config.distillation.teacher.path, config.trainer.fsdp.param_dtype = str(path), dtype
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_teacher_is_the_model_in_the_folder_in_the_dtype_of_passes(
    make_tiny_model, tiny_tokenizer, tmp_path, dtype
):
    policy, other = make_tiny_model(0), make_tiny_model(1)
    save(other, tiny_tokenizer, tmp_path)
    config = config_of(tmp_path, "bfloat16" if dtype == torch.bfloat16 else None)
    teacher = teacher_model(config, policy, tiny_tokenizer)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert {p.dtype for p in teacher.parameters()} == {dtype}
    ids = torch.arange(12)[None]
    with torch.no_grad():
        limits = {} if dtype == torch.float32 else {"atol": 0.2, "rtol": 0.1}
        torch.testing.assert_close(teacher(ids).logits.float(), other(ids).logits, **limits)
    config.distillation.weight = 0.0
    assert teacher_model(config, policy, tiny_tokenizer) is None


def test_a_larger_embedding_is_no_other_tokenizer(make_tiny_model, tiny_tokenizer, tmp_path):
    """Families of models pad the embedding to other sizes and share the tokenizer."""
    policy, wide = make_tiny_model(0), make_tiny_model(1)
    wide.resize_token_embeddings(wide.config.vocab_size + 8)
    save(wide, tiny_tokenizer, tmp_path / "wide")
    assert teacher_model(config_of(tmp_path / "wide"), policy, tiny_tokenizer) is not None
    save(policy, tiny_tokenizer, tmp_path / "narrow")
    with pytest.raises(UserError, match=r"narrow has a vocabulary of \d+ and the policy a larger one of \d+, so the "):
        teacher_model(config_of(tmp_path / "narrow"), wide, tiny_tokenizer)


def test_teachers_that_cannot_score_the_policys_tokens_are_refused(make_tiny_model, tiny_tokenizer, tmp_path):
    policy = make_tiny_model(0)
    with pytest.raises(UserError, match=r"distillation\.teacher\.path=.*none cannot be loaded .there is no such"):
        teacher_model(config_of(tmp_path / "none"), policy, tiny_tokenizer)
    save(make_tiny_model(1), train_tokenizer(OTHER_TEXT, 340, ("<sql>", "</sql>")), tmp_path / "other")
    with pytest.raises(UserError, match=r"other has another tokenizer than the policy \(token \d+ of the policy, '.*'"):
        teacher_model(config_of(tmp_path / "other"), policy, tiny_tokenizer)
    short = make_tiny_model(1)
    short.config.max_position_embeddings = 100
    save(short, tiny_tokenizer, tmp_path / "short")
    with pytest.raises(
        UserError, match=r"takes at most the 100 tokens that .* up to 256; set generator.max_context_length=100"
    ):
        teacher_model(config_of(tmp_path / "short"), policy, tiny_tokenizer)
    config = config_of(tmp_path / "short")
    config.distillation.top_k = 10_000
    with pytest.raises(UserError, match=r"top_k=10000 is more than the \d+ tokens that distillation.*short has; lower"):
        teacher_model(config, policy, tiny_tokenizer)
