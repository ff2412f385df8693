"""Loading of configured models: their attention, and errors."""

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl.command.compose import compose
from mtrl.errors import UserError
from mtrl.models.attention import OWN, multiplies
from mtrl.models.tiny import save
from mtrl.trainer.loading import (
    cast_parameters,
    fit_attention,
    load_model,
    load_peer,
    parameters_of,
    pick_device,
    recompute,
)
from mtrl.trainer.setup.models import reference_model, warn_of_offloads
from mtrl.trainer.update.value_learner import value_model

HALF = OWN if multiplies(torch.bfloat16) else "sdpa"


def config_of(*words):
    return OmegaConf.to_object(compose(["experiment=gsm8k", *words]))


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
    config, model = config_of(*words), make_tiny_model()
    model.set_attn_implementation("sdpa")
    fit_attention(model, config)
    assert model.config._attn_implementation == expected


def test_inputs_of_layers_stay_where_they_are_on_a_cpu(make_tiny_model, recwarn):
    config, model = (
        config_of("trainer.gradient_checkpointing=true", "trainer.activation_offload=true"),
        make_tiny_model(),
    )
    recompute(model, config)
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            copies.extend([function] if function is torch.ops.aten.copy_.default else [])
            return function(*args, **(kwargs or {}))

    with Copies():
        model(torch.arange(8)[None], use_cache=False)
    assert model.model.layers[0].gradient_checkpointing and not copies
    warn_of_offloads(config.trainer)
    (warning,) = recwarn
    assert str(warning.message) == (
        "trainer.activation_offload=true has no effect on a CPU, where activations are anyway"
    )


def change_weights(folder, change):
    """Replace the weights of a folder by what `change` returns for them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_a_folder_that_lacks_weights_is_an_error(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path / "other")
    change_weights(tmp_path / "other", lambda weights: {n: w for n, w in weights.items() if "layers.1." not in n})
    with pytest.raises(UserError, match=r"^model\.path=.*other lacks 11 weights of its model, such as model\.layers"):
        load_model(config_of("model.device=cpu"), str(tmp_path / "other"))


def test_a_folder_with_weights_of_another_shape_is_an_error(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path / "other")
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(tmp_path / "other", lambda weights: weights | {name: torch.zeros(4, 8)})
    with pytest.raises(UserError, match=rf"^model.path=.* has 1 weights of another shape .*{name} of \(4, 8\) instead"):
        load_model(config_of("model.device=cpu"), str(tmp_path / "other"))


def test_a_critic_needs_no_weights_of_a_head(make_tiny_model, tiny_tokenizer, tmp_path):
    model, folder = make_tiny_model(), tmp_path / "other"
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    save(model, tiny_tokenizer, folder)
    change_weights(folder, lambda weights: {name: value for name, value in weights.items() if name != "lm_head.weight"})
    config = config_of("algorithm=gae", f"algorithm.critic.path={folder}")
    assert torch.equal(value_model(config, model).body.norm.weight, model.model.norm.weight)
    with pytest.raises(UserError, match=r"^model.path=.* lacks 1 weights of its model, such as lm_head\.weight"):
        load_model(config, str(folder))
    change_weights(folder, lambda weights: {n: value for n, value in weights.items() if n != "model.norm.weight"})
    with pytest.raises(UserError, match=r"^algorithm\.critic\.path=.* lacks 1 weights of its model, .* model\.norm"):
        value_model(config, model)


def test_other_attention_is_not_replaced(make_tiny_model):
    config, model = config_of("trainer.fsdp.param_dtype=bfloat16"), make_tiny_model()
    model.set_attn_implementation("eager")
    fit_attention(model, config)
    assert model.config._attn_implementation == "eager"


def test_the_reference_is_the_model_in_the_folder(make_tiny_model, tiny_tokenizer, tmp_path):
    policy, other = make_tiny_model(0), make_tiny_model(1)
    save(other, tiny_tokenizer, tmp_path / "other")
    config = config_of("algorithm.kl_loss_coef=0.01", f"algorithm.kl_reference={tmp_path / 'other'}")
    reference = reference_model(config, policy)
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(reference(ids).logits, other(ids).logits)
    assert reference_model(config_of(), policy) is None


def test_a_peer_has_the_attention_of_the_policy(make_tiny_model, tiny_tokenizer, tmp_path):
    save(make_tiny_model(), tiny_tokenizer, tmp_path / "other")
    for words, expected in (
        ([], "sdpa"),
        (["trainer.fsdp.param_dtype=bfloat16"], HALF),
        (["trainer.packing=true"], OWN),
    ):
        peer = load_peer(config_of(*words), str(tmp_path / "other"), "algorithm.critic.path", make_tiny_model())
        assert peer.config._attn_implementation == expected


def test_unusable_reference_folders_are_errors(make_tiny_model, tiny_tokenizer, tmp_path):
    words = ("algorithm.kl_reward_coef=0.01", f"algorithm.kl_reference={tmp_path / 'other'}")
    with pytest.raises(UserError, match=r"algorithm\.kl_reference=.*other cannot be loaded .there is no such folder"):
        reference_model(config_of(*words), make_tiny_model())
    other = make_tiny_model()
    other.resize_token_embeddings(99)
    save(other, tiny_tokenizer, tmp_path / "other")
    with pytest.raises(UserError, match=r"algorithm\.kl_reference=.*other has a vocabulary of 99 and the"):
        reference_model(config_of(*words), make_tiny_model())


def test_an_unsupported_attention_is_an_error_that_names_the_key(tiny_tokenizer, tmp_path):
    """Gemma 2 caps its attention scores, which SDPA does not support."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    if Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this Transformers lets Gemma 2 use SDPA")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tiny_tokenizer)}
    save(Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)), tiny_tokenizer, tmp_path)
    words = ["model=hf", f"model.path={tmp_path}"]
    with pytest.raises(UserError, match="no attention by model.attn_implementation=sdpa; set model.attn_impl.*=eager"):
        load_model(config_of(*words), str(tmp_path))
    load_model(config_of(*words, "model.attn_implementation=eager"), str(tmp_path))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_a_missing_attention_package_is_an_error_that_names_the_key(
    make_tiny_model, tiny_tokenizer, tmp_path, attention
):
    save(make_tiny_model(), tiny_tokenizer, tmp_path)
    config = config_of("model=hf", f"model.path={tmp_path}", f"model.attn_implementation={attention}")
    with pytest.raises(UserError, match=rf"model.attn_implementation={attention} cannot be used .*package.*; install"):
        load_model(config, str(tmp_path))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_truncated_model_file_is_an_error_in_one_sentence(make_tiny_model, tiny_tokenizer, tmp_path, file):
    save(make_tiny_model(), tiny_tokenizer, tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:100])
    with pytest.raises(UserError, match=r"model.path=.* cannot be loaded \(.+\); give a folder or a Hub name of a"):
        load_model(config_of("model=hf", f"model.path={tmp_path}"), str(tmp_path))


@pytest.mark.parametrize(
    ("cuda", "failure", "why"),
    [
        (None, None, r"it is a build for CPUs; install a build for CUDA, see pytorch\.org"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update"),
            r"The NVIDIA driver on your system is too old \(found version 11040\); update the driver, or install",
        ),
        ("13.0", None, "it finds no device; check the driver"),
    ],
)
def test_a_gpu_that_pytorch_cannot_use_is_an_error(monkeypatch, cuda, failure, why):
    def init():
        if failure:
            raise failure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=rf"CUDA_VISIBLE_DEVICES=0 lists GPUs, and torch .* cannot use it \({why}"):
        pick_device("auto")
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto") == torch.device("cpu")


class _Arrivals(TorchDispatchMode):
    """Records the dtypes of tensors that are made on the meta device, which stands for a GPU."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_meta and result.ndim > 1:
            self.dtypes.add(result.dtype)
        return result


def test_weights_are_cast_before_they_are_moved(make_tiny_model):
    with _Arrivals() as arrivals:
        cast_parameters(make_tiny_model(), torch.bfloat16).to("meta")
    assert arrivals.dtypes == {torch.bfloat16}


def test_rotary_frequencies_stay_in_float32(make_tiny_model):
    before = dict(make_tiny_model().named_buffers())
    model = cast_parameters(make_tiny_model(), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert before and all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_parameters_are_counted_without_memory(make_tiny_model):
    model = make_tiny_model()
    assert parameters_of(model.config) == sum(parameter.numel() for parameter in model.parameters())
