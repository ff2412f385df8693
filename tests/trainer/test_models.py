"""Which attention the models that are trained get."""

import pytest
import torch
from omegaconf import OmegaConf

from mtrl.config.compose import compose
from mtrl.models.attention import OWN
from mtrl.models.onednn import multiplies
from mtrl.trainer.models import fit_attention

HALF = OWN if multiplies(torch.bfloat16) else "sdpa"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "sdpa"),
        (["trainer.packing=true"], OWN),
        (["trainer.fsdp.param_dtype=bfloat16"], HALF),
        (["model.dtype=bfloat16"], HALF),
        (["model.dtype=bfloat16", "trainer.fsdp.param_dtype=float32"], "sdpa"),
    ],
    ids=str,
)
def test_attention(words, expected, make_tiny_model):
    config = OmegaConf.to_object(compose(["experiment=gsm8k", *words]))
    model = make_tiny_model()
    model.set_attn_implementation("sdpa")
    fit_attention(model, config)
    assert model.config._attn_implementation == expected


def test_other_attention_stays(make_tiny_model):
    config = OmegaConf.to_object(compose(["experiment=gsm8k", "trainer.fsdp.param_dtype=bfloat16"]))
    model = make_tiny_model()
    model.set_attn_implementation("eager")
    fit_attention(model, config)
    assert model.config._attn_implementation == "eager"
