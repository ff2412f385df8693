"""Weight sync by files: complete folders only, and no folder remains."""

import asyncio
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from weight_server import Cast, WeightServer

from mtrl.config.engine_schema import SglangConfig, VllmConfig
from mtrl.engines.server import disk_sync
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.disk_sync import DiskSync
from mtrl.engines.server.sync import SyncError
from mtrl.engines.server.sync_folder import LOCK, PREFIX, SyncFolder, remove_abandoned
from mtrl.engines.server.transports import make_sync
from mtrl.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory, make_tiny_model, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("start")
    make_tiny_model().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def weights(seed=0, size=1000):
    return {"a": torch.randn(size, generator=torch.Generator().manual_seed(seed)), "b": torch.ones(3, 2).t()}


def folders(parent):
    return [path for path in Path(parent).iterdir() if path.name.startswith(PREFIX)]


def test_every_server_loads_a_whole_model_folder(tmp_path, model, make_tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = make_tiny_model(seed=5)
    state = {name: value for name, value in module.state_dict().items() if name != "lm_head.weight"}

    async def scenario():
        async with WeightServer("127.0.0.1:1") as a, WeightServer("127.0.0.1:2") as b:
            sync = make_sync(
                SglangConfig(sync_folder=str(tmp_path)), model=str(model), dtype="float32", lora_scaling=None
            )
            for version in (1, 2, 2):
                await sync.send([a, b], state, version)
                assert await a.state() == await b.state() == (version, checksum(state))
            (root,) = folders(tmp_path)
            assert root.stat().st_mode & 0o777 == 0o700
            (folder,) = [path for path in root.iterdir() if path.is_dir()]  # older ones are gone
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert all(torch.equal(value, module.state_dict()[name]) for name, value in loaded.state_dict().items())
            assert AutoTokenizer.from_pretrained(folder).encode("SELECT 1")
            await sync.close()
            assert not folders(tmp_path)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight is only in the files"),
        (lambda state: state.update(extra=torch.ones(3)), "extra is missing in the files"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight is \(3,\), in the files",
        ),
    ],
)
@pytest.mark.parametrize("way", ["disk", "distributed", "tensor"])
def test_weights_of_another_model_are_not_sent(tmp_path, model, make_tiny_model, way, change, words):
    state = {name: value for name, value in make_tiny_model().state_dict().items() if name != "lm_head.weight"}
    change(state)
    settings = SglangConfig(weight_sync=way, sync_folder=str(tmp_path))
    sync = make_sync(settings, model=str(model), dtype="float32", lora_scaling=None)
    with pytest.raises(UserError, match=words):
        asyncio.run(sync.send([], state, 1))


def test_large_models_are_split_into_several_files(tmp_path, model, monkeypatch):
    monkeypatch.setattr(disk_sync, "SHARD", 5000)

    async def scenario():
        async with WeightServer() as server:
            sync = DiskSync(VllmConfig(sync_folder=str(tmp_path)), str(model), Cast("float32"))
            many = {str(i): torch.randn(1000) for i in range(4)}
            await sync.send([server], many, 1)
            assert await server.state() == (1, checksum(many))
            (index,) = tmp_path.glob("*/*/model.safetensors.index.json")
            assert set(json.loads(index.read_text())["weight_map"]) == set(many)
            await sync.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "at"), [("kill", "receive_folder"), ("stop", "begin_update"), ("refuse", "end_update")]
)
def test_only_the_faulty_server_fails(tmp_path, model, fault, at):
    async def scenario():
        async with (
            WeightServer("127.0.0.1:1", seconds=3.0) as healthy,
            WeightServer("127.0.0.1:2", fault, at, seconds=3.0) as sick,
        ):
            sync = DiskSync(VllmConfig(sync_folder=str(tmp_path), sync_timeout=3.0), str(model), Cast("bfloat16"))
            with pytest.raises(SyncError) as caught:
                await sync.send([sick, healthy], weights(), 3)
            assert list(caught.value.failed) == [sick.url]
            assert await healthy.state() == (3, checksum(dict(Cast("bfloat16")(weights()))))
            async with WeightServer("127.0.0.1:3") as fresh:  # a replica that was started again
                await sync.send([fresh], weights(), 3)
                assert await fresh.state() == await healthy.state()
            await sync.close()

    asyncio.run(scenario())


def test_a_full_disk_is_reported_and_no_file_remains(tmp_path, model, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario():
        async with WeightServer() as server:
            sync = DiskSync(SglangConfig(sync_folder=str(tmp_path)), str(model), Cast("float32"))
            await sync.send([server], weights(0), 1)
            with monkeypatch.context() as patch:
                patch.setattr("huggingface_hub.save_torch_state_dict", full)
                with pytest.raises(UserError, match=r"generator\.sglang\.sync_folder=.*no space left"):
                    await sync.send([server], weights(1), 2)
            (root,) = folders(tmp_path)
            assert len([path for path in root.iterdir() if path.is_dir()]) == 1
            assert await server.state() == (1, checksum(weights(0)))
            await sync.send([server], weights(1), 2)
            assert await server.state() == (2, checksum(weights(1)))
            await sync.close()

    asyncio.run(scenario())


def test_the_full_disk_error_of_safetensors_is_recognised(tmp_path):
    from safetensors import SafetensorError

    def full(_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    folder = SyncFolder(str(tmp_path), "generator.vllm.sync_folder")
    with pytest.raises(UserError, match="no space left"):
        folder.write("version-1", 10, full)
    with pytest.raises(SafetensorError, match="header"):
        folder.write("version-1", 10, lambda _: (_ for _ in ()).throw(SafetensorError("header")))
    folder.close()


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    folder = SyncFolder(str(tmp_path / "file" / "below"), "generator.vllm.sync_folder")
    with pytest.raises(UserError, match=r"generator\.vllm\.sync_folder=.*file/below"):
        folder.write("version-1", 10, lambda path: None)


def test_only_folders_of_ended_processes_are_removed(tmp_path):
    code = (
        "import sys, time; from mtrl.engines.server.sync_folder import SyncFolder\n"
        "SyncFolder(sys.argv[1], 'key').write('version-1', 1, lambda path: (path / 'x').write_text('x'))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        children[0].kill()
        children[0].wait()
        assert len(folders(tmp_path)) == 2
        (just_made := tmp_path / f"{PREFIX}just-made").mkdir()
        (older := tmp_path / f"{PREFIX}older").mkdir()
        os.utime(older, (time.time() - 7200,) * 2)
        folder = SyncFolder(str(tmp_path), "key")
        folder.write("version-1", 1, lambda path: None)
        assert len([path for path in folders(tmp_path) if (path / LOCK).exists()]) == 2
        assert just_made.exists()
        assert not older.exists()
        folder.close()
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_shared_memory_is_the_default_if_it_has_room(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for size, parent in ((1, Path("/dev/shm")), (10**18, tmp_path)):
        folder = SyncFolder(None, "key")
        assert folder.write("version-1", size, lambda path: None).parent.parent == parent
        folder.close()


def test_a_folder_under_creation_is_not_removed(tmp_path, monkeypatch):
    lock = fcntl.flock

    def other_trainer_starts(descriptor, operation):
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", lock)
            remove_abandoned(tmp_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", other_trainer_starts)
    folder = SyncFolder(str(tmp_path), "key")
    written = folder.write("version-1", 10, lambda path: (path / "file").write_text("all"))
    assert (written / "file").read_text() == "all"
    monkeypatch.setattr(fcntl, "flock", lock)
    remove_abandoned(tmp_path)
    assert written.exists()
    folder.close()
