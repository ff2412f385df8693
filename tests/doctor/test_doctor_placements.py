"""Every model of conf/model on 1, 8 and 16 GPUs: it composes, passes the checks of a run, and fits by the estimate."""

import copy
import itertools
import re
import sys
from dataclasses import replace
from functools import cache

import pytest
from omegaconf import OmegaConf, open_dict
from renderers.configs import config_from_name

from mtrl.command.compose import compose, merge
from mtrl.command.hints import hints
from mtrl.config.keys import plain
from mtrl.config.overrides import CONF, normalise
from mtrl.doctor.architecture import find, table
from mtrl.doctor.layout import GIB
from mtrl.doctor.memory import Memory
from mtrl.doctor.plan import make_plan, plan_of
from mtrl.errors import UserError

pytestmark = pytest.mark.xdist_group("placements")  # which share the compositions

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem not in ("hf", "tiny", "tiny_vision"))
PLACEMENTS = {"1_gpu": (1, 1), "8_gpus": (1, 8), "16_gpus": (2, 8)}
WANTED = {
    *("qwen2_5_0_5b", "qwen2_5_1_5b", "qwen2_5_3b", "qwen2_5_7b"),
    *("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b"),
    *("llama3_2_1b", "llama3_2_3b", "llama3_1_8b", "gpt_oss_20b", "smollm2_135m"),
}


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    """Let the checks find both engines."""
    for engine in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"MTRL_{engine}_PYTHON", sys.executable)


@cache
def planned(model, placement):
    """The plans of all placements. Each model is composed only once, since that is slow."""
    cfg = composed(model).copy()
    with open_dict(cfg):
        cfg.placement = OmegaConf.merge(
            cfg.placement, OmegaConf.load(CONF / "placement" / f"{placement}.yaml").placement
        )
    return plan_of(cfg)


@cache
def composed(model):
    return merge(normalise([f"model={model}", "placement=8_gpus", "generator.backend=vllm"]))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placements_match_the_composed_configuration(placement):
    words = ["model=qwen3_32b", f"placement={placement}", "generator.backend=vllm"]
    found, expected = make_plan(words).memory.config, planned("qwen3_32b", placement).memory.config
    assert replace(found, run_dir="") == replace(expected, run_dir="")


def test_all_models_are_there():
    assert set(MODELS) == WANTED


@pytest.mark.parametrize(("model", "placement"), [*itertools.product(MODELS, PLACEMENTS)])
def test_it_composes_and_fits(model, placement):
    plan = planned(model, placement)
    assert plan.fits, plan.tightest
    config = plan.memory.config
    machines, gpus = PLACEMENTS[placement]
    assert (config.placement.machines, plan.gpus) == (machines, gpus)
    assert plan.memory.layout.gpus_needed <= gpus
    assert plan.memory.conversations() >= 1
    adapters = config.model.lora_rank > 0
    assert config.trainer.optimizer.lr == (1e-5 if adapters else 1e-6)
    assert config.model.dtype == ("bfloat16" if adapters else "float32"), "steps of 1e-6 vanish in bfloat16"
    assert not [warning for warning in plan.warnings if "optimizer.lr" in warning or "no effect" in warning]


@pytest.mark.parametrize("model", MODELS)
def test_the_file_says_where_full_fine_tuning_does_not_fit(model):
    """Adapters are set only if all weights would not fit, and the first lines of the file say so."""
    said = re.split(r"^model:", (CONF / "model" / f"{model}.yaml").read_text(), flags=re.MULTILINE)[0]
    said = " ".join(said.replace("#", " ").split())
    for placement in PLACEMENTS:
        memory = planned(model, placement).memory
        if memory.adapters:
            full = copy.deepcopy(memory.config)
            full.model.lora_rank, full.model.dtype, full.trainer.fsdp.cpu_offload = 0, "float32", False
            assert max(moment.over for moment in Memory(full, memory.model).moments()) > 0
            assert "LoRA" in said and "do not fit" in said
    assert "never run here" in said


@pytest.mark.parametrize("model", MODELS)
def test_lengths_and_renderer_are_the_models_own(model):
    config = planned(model, "8_gpus").memory.config
    assert config.model.path in table()
    assert config.generator.max_context_length <= find(config.model.path).max_position_embeddings
    if config.model.renderer != "auto":
        type(config_from_name(config.model.renderer))(thinking_retention="all")


def test_a_task_keeps_its_own_lengths():
    config = merge(["experiment=sop_hf", "model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm"])
    assert config.generator.max_context_length == 24576
    assert config.generator.sampling_params.max_generate_length == 2048
    assert config.trainer.max_tokens_per_microbatch == 16384


def warnings(config):
    return hints(config, plain(config))


def test_the_engine_that_is_chosen_gets_the_layout_without_a_warning():
    config = merge(["model=qwen3_8b", "placement=8_gpus", "generator=sglang"])
    assert config.generator.backend == "sglang" and config.generator.sglang.replicas == 4
    assert not [warning for warning in warnings(config) if "no effect" in warning]
    config.generator.backend, config.generator.sglang.replicas = "vllm", 2
    assert [warning for warning in warnings(config) if "generator.sglang.replicas=2 has no effect" in warning]


def test_missing_ranks_are_warned_about(monkeypatch):
    config = composed("qwen3_8b")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [warning for warning in warnings(config) if "torchrun --nnodes 1 --nproc-per-node 4" in warning]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not [warning for warning in warnings(config) if "placement.ranks" in warning]


@pytest.mark.parametrize("model", ["tiny", "hf"])
def test_a_model_without_a_placement_table_is_refused(model):
    with pytest.raises(UserError, match="placement=8_gpus takes its numbers from the model's own table"):
        compose([f"model={model}", "model.path=owner/name", "placement=8_gpus"])


def test_the_table_of_the_document_is_the_estimate():
    table_of = (CONF.parent / "docs" / "machines.md").read_text().partition("<!-- estimated -->")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table_of.partition("<!-- /")[0], re.MULTILINE)
    assert {name for name, *_ in rows} == WANTED
    for name, *cells in rows:
        for placement, cell in zip(PLACEMENTS, cells, strict=True):
            plan = planned(name, placement)
            memory = plan.memory
            kind = ("LoRA" if memory.adapters else "full") + ", offloaded" * memory.config.trainer.fsdp.cpu_offload
            needed = max(moment.needed for moment in plan.moments if moment.room == memory.room)
            told = f"{kind}: {needed / GIB:.1f}; {memory.conversations():,}"
            assert f"{memory.room / GIB:.0f}" == "79", "the number of the sentence above the table"
            assert cell == told, (name, placement)


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*_hf.yaml")))
def test_the_model_that_is_named_is_trained(experiment):
    """Experiments for real models have a default model, which a command can replace."""
    assert merge([f"experiment={experiment}", "model=llama3_2_1b"]).model.path == "meta-llama/Llama-3.2-1B-Instruct"
    own = merge([f"experiment={experiment}"])
    assert own.model.path.startswith("Qwen/") and not own.model.recipe
    own.model.path = "folder"
    assert own.model.path == "folder"


def test_a_copy_in_a_folder_is_named_by_its_path():
    assert merge(["model=qwen3_8b", "model.path=/copies/qwen3"]).model.path == "/copies/qwen3"
