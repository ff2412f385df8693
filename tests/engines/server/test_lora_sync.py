"""Sync of adapters to servers: merged into the weights, or as a folder of peft."""

import asyncio
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from weight_server import WeightServer

from mtrl.config.engine_schema import SglangConfig, VllmConfig
from mtrl.config.model_schema import ModelConfig
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.lora_sync import MergedWeights, adapter_name
from mtrl.engines.server.transports import make_sync
from mtrl.errors import UserError
from mtrl.models.lora import LoraWeights, adapter_state, add_adapters, save_adapter_files, scaling_of


@pytest.fixture(scope="module")
def start(tmp_path_factory, make_tiny_model, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("start")
    make_tiny_model().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapted(make_tiny_model):
    """A module whose adapters are not 0."""
    module = add_adapters(make_tiny_model(), ModelConfig(lora_rank=3, lora_alpha=5))
    for name, value in adapter_state(module).items():
        value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_equal_those_of_the_local_engine_bit_for_bit(start, adapted, make_tiny_model, dtype):
    plain = make_tiny_model().to(getattr(torch, dtype))
    LoraWeights(scaling_of(adapted), LoraWeights.of(adapted).matrices)(plain, adapter_state(adapted))
    expected = {name: value for name, value in plain.state_dict().items() if name != "lm_head.weight"}
    merged = MergedWeights(str(start), dtype, scaling_of(adapted))
    for _ in range(2):  # from the start every time
        assert checksum(dict(merged(adapter_state(adapted)))) == checksum(expected)


def test_an_adapter_without_a_base_matrix_is_reported(start, adapted):
    odd = {name.replace("layers.0", "layers.9"): value for name, value in adapter_state(adapted).items()}
    with pytest.raises(UserError, match="layers.9.*no matrix"):
        MergedWeights(str(start), "float32", 1.0)(odd)


def test_a_model_without_safetensors_is_reported(tmp_path, adapted):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no safetensors files"):
        MergedWeights(str(tmp_path), "float32", 1.0)(adapter_state(adapted))


def test_the_adapter_folder_has_the_format_of_peft(tmp_path, start, adapted, make_tiny_model):
    save_adapter_files(adapter_state(adapted), scaling_of(adapted), str(start), tmp_path)
    again = PeftModel.from_pretrained(make_tiny_model(), tmp_path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, adapted.eval()(ids).logits)


def test_changes_of_merged_weights_are_sent(start, adapted):
    async def scenario():
        async with WeightServer() as server:
            settings = VllmConfig(weight_sync="distributed", sync_delta=True)
            sync = make_sync(settings, model=str(start), dtype="bfloat16", lora_scaling=scaling_of(adapted))
            first = adapter_state(adapted)
            second = {name: value * (1 + 1e-4) for name, value in first.items()}
            merged = MergedWeights(str(start), "bfloat16", scaling_of(adapted))
            sizes = []
            for version, adapters in ((1, first), (2, second)):
                await sync.send([server], adapters, version)
                assert await server.state() == (version, checksum(dict(merged(adapters))))
                sizes.append(sync.sent_bytes)
            assert server.bases == [None, 1] and sizes[1] < sizes[0] / 20
            await sync.close()

    asyncio.run(scenario())


def test_every_version_is_a_separate_adapter(tmp_path, start, adapted):
    async def scenario():
        async with WeightServer("127.0.0.1:1") as a, WeightServer("127.0.0.1:2") as b:
            settings = SglangConfig(lora="adapter", sync_folder=str(tmp_path))
            sync = make_sync(settings, model=str(start), dtype="float32", lora_scaling=scaling_of(adapted))
            for version in range(1, 5):
                await sync.send([a, b], adapter_state(adapted), version)
                (folder,) = tmp_path.glob(f"*/{adapter_name(version)}")
                assert len(load_file(folder / "adapter_model.safetensors")) == len(adapter_state(adapted))
                assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3
            assert len(list(tmp_path.glob("*/policy-*"))) == 2
            assert a.calls == b.calls == ["ready", *["load_adapter"] * 4]
            await sync.close()
            assert not list(tmp_path.iterdir())

    asyncio.run(scenario())
