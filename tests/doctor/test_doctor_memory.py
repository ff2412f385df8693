"""The estimate of memory, compared with a real trainer."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtrl.command.compose import merge
from mtrl.config.overrides import normalise
from mtrl.distributed.world import World
from mtrl.doctor.architecture import find
from mtrl.doctor.changes import possible_changes
from mtrl.doctor.memory import Memory, Moment, Part, main_memory
from mtrl.doctor.plan import make_plan, plan_of, to_json
from mtrl.engines.local.cache import SlotCache
from mtrl.errors import UserError
from mtrl.models.tiny import save
from mtrl.trainer.setup.models import make_learner

FULL = ["trainer.fsdp.param_dtype=bfloat16", "model.dtype=float32"]


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """The folder of a random model of a known kind, from which a run could start."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=len(tiny_tokenizer),
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    save(Qwen3ForCausalLM(config), tiny_tokenizer, tmp_path / "model")
    return str(tmp_path / "model")


def memory_of(*overrides):
    config = OmegaConf.to_object(merge(normalise([*overrides, "model=hf"])))
    return config, Memory(config, find(config.model.path))


def size(tensors):
    parts = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in parts)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.dtype=bfloat16"],
        ["trainer.fsdp.param_dtype=bfloat16"],
        ["model.lora_rank=4", "model.dtype=bfloat16"],
        ["algorithm.kl_loss_coef=0.1"],
        ["algorithm.advantage_method=gae"],
        ["distillation.teacher.path={folder}", "trainer.fsdp.param_dtype=bfloat16"],
    ],
    ids=" ".join,
)
def test_states_are_those_of_a_real_trainer(folder, overrides):
    """Parameters, gradients and moments, byte for byte, after a backward pass and an optimiser step."""
    words = [word.format(folder=folder) for word in overrides]
    config, memory = memory_of(f"model.path={folder}", "model.device=cpu", *words)
    learner = make_learner(config, World(), folder)
    trained = [learner.policy.model] + ([learner.critic.model] if learner.critic else [])
    found = dict.fromkeys(memory.states(), 0)
    ids = torch.arange(8)[None]
    for model, optimizer, name in zip(trained, [learner.optimizer, None], ["", "critic"], strict=False):
        optimizer = optimizer or learner.critic.optimizer
        everywhere = {"chosen": torch.ones_like(ids, dtype=torch.bool)} if name else {}
        output = model(input_ids=ids, **everywhere)
        (output if name else output.logits).float().sum().backward()
        gradients = size(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step(0)
        moments = size(value for key, value in optimizer.state().items() if not key.endswith(".step"))
        weights = size(model.parameters())
        if name:
            found[name] = weights + gradients + moments
        else:
            found |= {"weights": weights, "gradients": gradients, "moments of Adam": moments}
    for name, frozen in (("reference", learner.reference), ("teacher", learner.teacher)):
        if frozen is not None:
            found[name] = size(frozen.model.parameters())
    assert found == memory.states()


def test_shards_share_the_states(folder):
    _, alone = memory_of(f"model.path={folder}", *FULL, "placement.ranks=1")
    _, shared = memory_of(f"model.path={folder}", *FULL, "placement.ranks=4", "placement.machines=2")
    assert shared.layout.shards == 8
    assert all(shared.states()[name] == whole // 8 for name, whole in alone.states().items())
    _, copies = memory_of(f"model.path={folder}", *FULL, "placement.ranks=8", "trainer.fsdp.replicas=2")
    assert copies.layout.shards == 4


def test_keys_and_values_of_the_local_engine(folder):
    small = ["generator.max_num_seqs=5", "generator.max_context_length=100"]
    _, memory = memory_of(f"model.path={folder}", "model.dtype=bfloat16", *small)
    cache = SlotCache(2, 1, 16, torch.bfloat16, torch.device("cpu"))
    cache.reserve(5, 100)
    (part,) = memory.local_engine(learning=True)  # which shares the trainer's weights
    assert part == Part("engine's keys and values", size([*cache.keys, *cache.values]))
    _, mixed = memory_of(f"model.path={folder}", *small)  # weights in float32, passes and turns in bfloat16
    parts = list(mixed.local_engine(learning=False))
    assert mixed.layout.computed == 2 and part in parts and len(parts) == 2


def test_an_engine_in_main_memory_has_a_cache_only_while_it_samples(folder):
    cached = {"engine's packed matrices", "engine's keys and values"}
    for words, is_freed in ([], True), (["async_config.max_steps_off_policy=1"], False):
        config, _ = memory_of(f"model.path={folder}", "generator.max_context_length=100", *words)
        moments = Memory(config, find(config.model.path), main_memory(2**30)).moments()
        held = {moment.when: cached & {part.name for part in moment.parts} for moment in moments}
        assert held.pop("rollouts") == cached and len(held) == 4
        assert all(names == (set() if is_freed else cached) for names in held.values())
    config, _ = memory_of(f"model.path={folder}", "generator.max_num_seqs=3", "generator.max_context_length=100")
    memory = Memory(config, find(config.model.path), replace(main_memory(2**30), bfloat16=False))
    cache = SlotCache(2, 1, 16, torch.float32, torch.device("cpu"))
    cache.reserve(3, 100)
    assert Part("engine's keys and values", size([*cache.keys, *cache.values])) in memory.local_engine(learning=False)


@pytest.mark.parametrize(
    ("words", "frees"),
    [
        ([], True),
        (["generator.local.process=true"], False),
        (["rollouts.workers=2"], False),
        (["async_config.max_steps_off_policy=1", "generator.local.process=false"], False),
        (["model.lora_rank=4"], False),
    ],
)
def test_an_engine_in_main_memory_frees_its_copy_during_updates(folder, words, frees):
    config, on_gpu = memory_of(f"model.path={folder}", *words)
    in_main_memory = Memory(config, find(config.model.path), replace(main_memory(2**30), bfloat16=True))
    for memory, freed in (in_main_memory, frees), (on_gpu, False):
        names = [[part.name for part in memory.local_engine(learning)] for learning in (False, True)]
        assert ["engine's copy of the weights" in found for found in names] == [True, not freed]


def test_memory_outside_the_gpu_is_not_counted(folder):
    def on_gpu(*overrides):
        return {part.name for part in memory_of(f"model.path={folder}", *overrides)[1].held(learning=True)}

    assert on_gpu() >= {"weights", "gradients", "moments of Adam"}
    assert "moments of Adam" not in on_gpu("trainer.optimizer.offload=true")
    assert not on_gpu("trainer.fsdp.cpu_offload=true") & {"weights", "gradients", "moments of Adam"}


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("trainer.gradient_checkpointing=true", "trainer.gradient_checkpointing=false"),
        ("trainer.recomputed_layers=20", "trainer.recomputed_layers=19"),
        ("trainer.activation_offload=true", "trainer.activation_offload=false"),
        ("trainer.max_tokens_per_microbatch=1024", "trainer.max_tokens_per_microbatch=32768"),
        ("trainer.fsdp.reshard_after_forward=true", "trainer.fsdp.reshard_after_forward=false"),
        ("trainer.fsdp.reduce_dtype=bfloat16", "trainer.fsdp.reduce_dtype=float32"),
        ("placement.ranks=8", "placement.ranks=2"),
        ("algorithm.kl_loss_coef=0", "algorithm.kl_loss_coef=0.1"),
        ("model.attn_implementation=sdpa", "model.attn_implementation=eager"),
        ("trainer.max_logits_per_chunk=1000000", "trainer.max_logits_per_chunk=134217728"),
        ("trainer.sequence_parallel=4", "trainer.sequence_parallel=2"),
        ("trainer.tensor_parallel=4", "trainer.tensor_parallel=2"),
    ],
)
def test_memory_saving_settings_reduce_the_estimate(less, more):
    common = ["model.path=Qwen/Qwen3-8B", *FULL, "generator=vllm", "generator.max_context_length=1024"]
    common += ["trainer.gradient_checkpointing=true"]

    def needed(setting):
        return sum(moment.needed for moment in memory_of(*common, setting)[1].moments())

    assert needed(less) < needed(more)


def test_activations_by_the_number_of_recomputed_layers():
    words = ["model.path=Qwen/Qwen3-8B", "placement.ranks=4", "trainer.gradient_checkpointing=true"]
    words += ["generator.max_context_length=8192", "trainer.max_tokens_per_microbatch=16384"]
    stored, host = {}, {}
    for count, offload in product((12, "null"), ("false", "true")):
        more = [f"trainer.recomputed_layers={count}", f"trainer.activation_offload={offload}"]
        _, memory = memory_of(*words, *more, "trainer.fsdp.param_dtype=bfloat16")
        stored[count, offload], host[count, offload] = memory.stored_activations(), memory.host()["step"]
    each, layer = 16384 * 4096 * 2, memory.layer_activations()
    assert stored["null", "false"] == (36 + 4) * each
    assert stored["null", "true"] == (2 + 4) * each, "two inputs are on the GPU at once"
    assert stored[12, "false"] == (12 + 4) * each + 24 * layer
    assert stored[12, "true"] == (2 + 4) * each + 24 * layer
    assert host["null", "true"] - host["null", "false"] == 4 * 36 * each, "in the memory of the host, of four ranks"
    assert host[12, "true"] - host[12, "false"] == 4 * 12 * each


@pytest.mark.parametrize("offload", [False, True])
def test_several_ranks_load_no_model_whole(offload):
    """Rank 0 reads the embedding, the head and a layer of each kind: of a dense model with 152k tokens and a width of
    4,096, and of mixtures with 128 experts of 768 and 32 of 2,880 inner widths."""

    def loading(path, ranks, *words):
        words = [f"model.path={path}", f"placement.ranks={ranks}", f"trainer.fsdp.cpu_offload={offload}", *words]
        _, memory = memory_of(*words)
        return memory.host()["loading"], memory.model

    slices = 1 + offload
    kl = "algorithm.kl_loss_coef=0.1"
    for words, copies in (((), 1), ((kl,), 2)):
        alone, model = loading("Qwen/Qwen3-8B", 1, *words)
        assert alone == copies * slices * model.parameters * 4
        several, _ = loading("Qwen/Qwen3-8B", 8, *words, "generator.backend=vllm")
        layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
        checked = 4 * (2 * 151936 * 4096 + 4096 + layer) + 2 * 151936 * 4096
        assert several == checked + 4 * offload * copies * model.parameters
        embedded, _ = loading("Qwen/Qwen3-8B", 8, *words)
        assert embedded == 4 * (1 + offload * copies) * model.parameters, "the engine's copy is loaded whole"
        several, mixture = loading("Qwen/Qwen3-30B-A3B", 8, *words, "generator.backend=vllm")
        layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * (2048 + 3 * 2048 * 768) + 2 * 2048 + 2 * 128
        checked = 4 * (2 * 151936 * 2048 + 2048 + layer) + 2 * 128 * 2048 * 2 * 768
        assert several == checked + 4 * offload * copies * mixture.parameters
        embedded, _ = loading("Qwen/Qwen3-30B-A3B", 8, *words)
        assert embedded == 4 * (1 + offload * copies) * mixture.parameters
        several, mixture = loading("lmsys/gpt-oss-20b-bf16", 8, *words, "generator.backend=vllm")
        checked = 4 * (mixture.root + 2 * mixture.layer) + 2 * 201088 * 2880
        assert several == checked + 4 * offload * copies * mixture.parameters, "some layers have a sliding window"


def test_inputs_are_not_offloaded_from_main_memory_to_itself():
    words = ["model.path=Qwen/Qwen3-8B", "model.device=cpu", "trainer.gradient_checkpointing=true"]
    config, memory = memory_of(*words, "trainer.activation_offload=true")
    assert memory.stored_activations() < Memory(config, memory.model, main_memory(2**40)).stored_activations()


def test_as_few_layers_are_recomputed_as_fit():
    words = ["model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm", "placement.gpu_memory=60"]
    stored = make_plan([*words, "trainer.gradient_checkpointing=false"])
    count = stored.change["trainer.recomputed_layers"]
    assert stored.change == {"trainer.gradient_checkpointing": True, "trainer.recomputed_layers": count}
    plans = [make_plan([*words, f"trainer.recomputed_layers={n}"]) for n in (count, count - 1, 1)]
    assert [all(moment.is_comfortable for moment in plan.moments) for plan in plans] == [True, False, False]
    assert not plans[0].faster and not plans[1].faster
    assert not plans[2].fits and plans[2].change == {"trainer.recomputed_layers": count}
    all_layers = make_plan(words)
    assert all_layers.fits and all_layers.faster == {"trainer.recomputed_layers": count}
    offloaded = make_plan([*words[:3], "placement.gpu_memory=500", "trainer.activation_offload=true"])
    assert offloaded.faster == {"trainer.recomputed_layers": 1}, "inputs of no layer would be moved"
    large = make_plan([*words[:3], "placement.gpu_memory=500"])
    assert large.faster == {"trainer.gradient_checkpointing": False}


def test_inputs_are_offloaded_before_the_moments():
    words = ["model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm", "placement.gpu_memory=54"]
    words += ["generator.max_context_length=32768", "trainer.max_tokens_per_microbatch=32768"]
    plan = make_plan([*words, "model.attn_implementation=flash_attention_2", "trainer.recomputed_layers=30"])
    assert not plan.fits and plan.change == {"trainer.recomputed_layers": None, "trainer.activation_offload": True}


def test_a_moment_adds_up():
    moment = Moment("GPU", "now", (Part("a", 3), Part("b", 4)), room=5)
    assert (moment.needed, moment.over) == (7, 2)


def test_a_conversation_is_never_cut_so_it_bounds_the_micro_batch():
    _, memory = memory_of("model.path=Qwen/Qwen3-0.6B", "generator.max_context_length=30000")
    assert memory.tokens == 30000


def test_ranks_that_share_sequences_share_activations():
    words = ["model.path=Qwen/Qwen3-8B", "placement.ranks=4", "trainer.max_tokens_per_microbatch=40000"]
    alone, shared = (memory_of(*words, f"trainer.sequence_parallel={parts}")[1] for parts in (1, 4))
    assert shared.tokens == alone.tokens == 40960 and shared.own_tokens == 10240
    assert shared.stored_activations() == alone.stored_activations() // 4
    assert shared.layer_activations() == alone.layer_activations() // 4
    assert shared.states() == alone.states()


def test_ranks_that_divide_matrices_gather_their_part():
    words = ["model.path=Qwen/Qwen3-8B", "placement.ranks=4", "trainer.fsdp.param_dtype=bfloat16"]
    alone, divided = (memory_of(*words, f"trainer.tensor_parallel={parts}")[1] for parts in (1, 4))
    assert divided.gathered() == pytest.approx(alone.gathered() / 4, rel=1e-3)
    assert divided.whole_gradients(divided.part.layer) == pytest.approx(
        alone.whole_gradients(alone.part.layer) / 4, rel=1e-3
    )
    assert alone.layer_activations() / 4 < divided.layer_activations() < alone.layer_activations() / 2
    assert divided.states() == pytest.approx(alone.states(), rel=1e-3) and divided.states() != alone.states()


def test_ranks_that_divide_experts_gather_their_own():
    words = ["model.path=lmsys/gpt-oss-20b-bf16", "placement.ranks=8"]
    alone, divided = (memory_of(*words, f"trainer.expert_parallel={parts}")[1] for parts in (1, 8))
    assert divided.part.experts == alone.part.experts // 8 and divided.gathered() < alone.gathered() / 2
    assert divided.states() == alone.states()
    changes = list(possible_changes(divided.config, divided.model))
    keys = {key for change in changes for key in change}
    assert not keys & {"trainer.sequence_parallel", "model.lora_rank"}, "they do not work with divided models"


def test_sharing_sequences_is_proposed_for_a_long_context():
    words = ["model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm", "placement.gpu_memory=50"]
    words += ["trainer.gradient_checkpointing=true", "trainer.fsdp.param_dtype=bfloat16"]
    words += ["generator.max_context_length=32768", "trainer.max_tokens_per_microbatch=32768"]
    plan = make_plan([*words, "generator.gpu_memory_utilization=0.9"])
    assert not plan.fits and plan.change == {"trainer.sequence_parallel": 4}, (plan.tightest, plan.change)


def test_a_plan_names_one_change_that_makes_it_fit():
    words = ["model=qwen3_4b", "placement=1_gpu", "generator.backend=vllm", "model.lora_rank=0", "model.lora_alpha=16"]
    words += ["model.dtype=float32", "trainer.optimizer.lr=1e-6", "placement.gpu_memory=60"]
    cfg = merge(normalise(words))
    plan = plan_of(cfg)
    assert not plan.fits and plan.tightest.over > 0
    assert plan.change["model.lora_rank"] == 64
    for key, value in plan.change.items():
        OmegaConf.update(cfg, key, value)
    assert plan_of(cfg).fits


def test_a_change_is_one_that_the_run_takes():
    """Ranks are a multiple of the replicas, a response fits in the conversation, and heads are not divided."""
    words = ["model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm"]
    plan = make_plan([*words, "placement.ranks=4", "trainer.fsdp.replicas=4", "trainer.fsdp.param_dtype=null"])
    assert not plan.fits
    config = memory_of("model.path=Qwen/Qwen2.5-7B-Instruct", "generator=vllm")[0]
    config.trainer.fsdp.replicas, config.generator.sampling_params.max_generate_length = 4, 8192
    changes = list(possible_changes(config, find(config.model.path)))
    assert {"placement.ranks": 4} in changes and {"placement.ranks": 2} not in changes
    assert {c["generator.max_context_length"] for c in changes if "generator.max_context_length" in c} == {16384}
    assert {c[key] for c in changes if (key := "generator.vllm.tensor_parallel_size") in c} == {2, 4}


def test_more_gpus_are_proposed_if_their_number_is_not_set():
    words = ["model=hf", "model.path=Qwen/Qwen3-32B", "model.lora_rank=8", "model.dtype=bfloat16", "generator=vllm"]
    words += ["trainer.gradient_checkpointing=true", "trainer.fsdp.cpu_offload=true", "placement.gpu_memory=48"]
    words += ["trainer.max_tokens_per_microbatch=4096", "generator.max_context_length=4096"]
    plan = make_plan([*words, "generator.sampling_params.max_generate_length=1024", "trainer.optimizer.lr=1e-5"])
    assert not plan.fits and plan.change == {"generator.vllm.tensor_parallel_size": 2}, plan.tightest


def test_gpus_of_a_server_beyond_its_key_heads_hold_copies():
    def conversation(size):
        words = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "generator=vllm"]
        return memory_of(*words, f"generator.vllm.tensor_parallel_size={size}")[1].conversation()

    assert conversation(1) == 2 * conversation(2) and conversation(14) == conversation(7) == conversation(2)


def test_too_few_gpus_are_reported():
    plan = make_plan(["model=qwen3_0_6b", "placement=8_gpus", "generator.backend=vllm", "placement.ranks=6"])
    assert plan.crowd == 2 and not plan.fits


def test_no_change_is_proposed_for_a_far_too_large_model():
    words = ["model=qwen3_32b", "placement=1_gpu", "generator.backend=vllm", "placement.gpu_memory=8"]
    plan = make_plan(words)
    assert not plan.fits and plan.change is None


def test_a_plan_is_json():
    plan = make_plan(["model=qwen3_8b", "placement=8_gpus", "generator.backend=vllm"])
    told = json.loads(json.dumps(to_json(plan)))
    assert told["fits"] and told["parameters"] == 8190735360 and told["ranks"] == 4
    assert all(sum(moment["parts"].values()) == moment["needed"] for moment in told["moments"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=tiny"], "fits every machine"),
        (["model=hf", "model.path=owner/none"], "is neither a folder"),
        (["model=qwen3_8b", "trainer.fsdp.replicas=3", "placement=8_gpus"], "trainer.fsdp.replicas=3 does not divide"),
        (["model=qwen3_8b", "nonsense.key=1"], "nonsense.key"),
        (["model=qwen3_8b", "trainer.fsdp.replicas=0"], "trainer.fsdp.replicas=0 must be at least 1"),
        (["model=qwen3_8b", "placement.machines=0"], "placement.machines=0 must be at least 1"),
        (["model=qwen3_8b", "placement.gpu_memory=inf"], "placement.gpu_memory=inf must be a finite number"),
        (["model=qwen3_8b", "generator.max_context_length=1000000"], "more than the 40960 tokens that the model holds"),
        (
            ["model=qwen3_8b", "placement=8_gpus", "trainer.recomputed_layers=37"],
            "trainer.recomputed_layers=37 is more than the model's 36 layers; lower it",
        ),
        (["model=qwen3_8b", "model.lora_rank=8192"], "model.lora_rank=8192 is more than the rank 4096 "),
        (["model=qwen3_8b", "model.lora_rank=8", "model.lora_target_modules=[qkv]"], "=qkv names no linear layer"),
        (
            ["model=qwen2_5_7b", "placement.ranks=8", "trainer.sequence_parallel=8"],
            "trainer.sequence_parallel=8 does not divide the model's 28 attention heads; take one of 1, 2, 4",
        ),
        (
            ["model=qwen2_5_7b", "generator=vllm", "generator.vllm.tensor_parallel_size=8"],
            "tensor_parallel_size=8 does not divide the model's 28 attention heads; take one of 1, 2, 4",
        ),
        (
            ["model=llama3_2_3b", "generator=vllm", "generator.vllm.tensor_parallel_size=6"],
            "tensor_parallel_size=6 is neither a divisor nor a multiple of the model's 8 heads .*; take one of 1, 2, 4",
        ),
        (
            ["model=qwen2_5_7b", "placement.ranks=8", "trainer.tensor_parallel=8"],
            "trainer.tensor_parallel=8 does not divide the model's 4 heads of keys and values; use a divisor of 4",
        ),
        (
            ["model=qwen3_8b", "placement=8_gpus", "placement.ranks=4", "trainer.expert_parallel=2"],
            "trainer.expert_parallel=2: a qwen3 model has no experts; set it to 1",
        ),
    ],
)
def test_a_plan_is_checked_as_a_run_is(words, sentence, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match=sentence):
        make_plan(words)
    import os

    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("overrides", "copies", "bucket"),
    [
        ([*FULL, "generator.local.process=false"], 0, 500),
        ([*FULL, "generator.local.process=true"], 1, 500),
        ([*FULL, "generator=vllm", "generator.vllm.weight_sync=distributed"], 2, 1000),
        (["generator.local.process=false", "model.dtype=bfloat16"], 0, 0),
    ],
    ids=["local", "process", "servers", "shared"],
)
def test_weights_on_their_way_take_one_bucket_of_main_memory(folder, monkeypatch, overrides, copies, bucket):
    """The bucket is added to the permanent memory: the block of an engine's process, or the kept weights of servers."""
    monkeypatch.setattr("mtrl.doctor.memory.WEIGHT_BUCKET", 1000)
    monkeypatch.setattr("mtrl.doctor.memory.COPY_BUCKET", 500)
    _, memory = memory_of(f"model.path={folder}", *overrides)
    whole = memory.model.parameters * memory.layout.computed
    assert memory.host()["step"] == copies * whole + bucket


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ([], 3),
        (["generator.vllm.tensor_parallel_size=2"], 6),
        (["generator.vllm.urls=[http://10.0.0.1:1]"], 0),
        (["model.lora_rank=4"], 3),
        (["model.lora_rank=4", "generator.vllm.lora=adapter"], None),
        (["generator.vllm.weight_sync=disk"], None),
    ],
)
def test_each_worker_keeps_the_weights_to_which_changes_are_applied(folder, monkeypatch, more, kept, tmp_path):
    monkeypatch.setattr("mtrl.doctor.memory.WEIGHT_BUCKET", 1000)
    base = ["generator=vllm", "generator.vllm.replicas=3", f"generator.vllm.sync_folder={tmp_path}"]
    words = [*base, "generator.vllm.weight_sync=distributed", *more]
    steps = []
    for delta in ("true", "false"):
        _, memory = memory_of(f"model.path={folder}", *words, f"generator.vllm.sync_delta={delta}")
        steps.append(memory.host()["step"])
    whole = memory.model.parameters * memory.layout.computed
    assert steps[0] - steps[1] == (0 if kept is None else kept * whole + 1000)


@pytest.mark.parametrize("way", ["distributed", "disk"])
def test_adapters_are_merged_bucket_by_bucket_unless_servers_read_files(folder, monkeypatch, way, tmp_path):
    monkeypatch.setattr("mtrl.doctor.memory.WEIGHT_BUCKET", 1000)
    servers = ["generator=vllm", f"generator.vllm.weight_sync={way}", f"generator.vllm.sync_folder={tmp_path}"]
    _, memory = memory_of(f"model.path={folder}", "model.lora_rank=4", *servers)
    merged = memory.model.parameters * memory.layout.computed if way == "disk" else 1000
    assert memory.host()["step"] == 2 * memory.adapters * 4 + merged


@pytest.mark.parametrize(
    ("more", "copies"),
    [
        (["placement.ranks=8"], 2),
        (["placement.ranks=8", "model.lora_rank=4"], 2),
        (["model.lora_rank=4", "model.dtype=bfloat16"], 2),
        (["model.dtype=bfloat16"], 0),
    ],
)
def test_the_export_has_the_whole_weights_twice_in_main_memory(folder, more, copies):
    """A single rank without mixed precision and without adapters writes the module that it has."""
    _, memory = memory_of(f"model.path={folder}", "generator.local.process=false", *more)
    host = memory.host()
    assert host["export"] - host["step"] == copies * memory.model.parameters * memory.layout.stored
