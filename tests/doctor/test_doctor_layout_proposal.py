"""A layout is proposed that fits, that the run takes, and to which no preferred one that fits exists."""

import json
import shlex
from itertools import product

import pytest

from mtrl.command.compose import merge
from mtrl.config.overrides import normalise
from mtrl.doctor import __main__ as doctor
from mtrl.doctor.layout_proposal import AWAY, propose
from mtrl.doctor.plan import make_plan
from mtrl.errors import UserError


@pytest.mark.parametrize(
    "words",
    [
        ["model=qwen3_8b", "placement.gpus=8"],
        ["model=qwen3_14b", "placement.gpus=8", "async_config.max_steps_off_policy=2"],
        ["model=qwen3_4b", "placement.gpus=4", "placement.machines=2", "generator.backend=sglang"],
        ["model=qwen3_0_6b", "placement.gpus=1", "generator=local"],
        ["model=gpt_oss_20b", "placement.gpus=8"],
        ["model=qwen3_4b", "placement.gpus=8", "model.lora_rank=64", "model.dtype=bfloat16"],
        ["model=qwen3_4b", "placement.gpus=8", "algorithm=turn_gae"],
        ["model=qwen3_8b", "placement.gpus=8", "generator.vllm.weight_sync=distributed"],
        ["model=qwen3_8b", "placement.gpus=8", "generator.vllm.weight_sync=tensor"],
        ["model=qwen3_8b", "placement.gpus=8", "generator.vllm.devices=[4,5,6,7]"],
        ["model=qwen3_8b", "placement.gpus=8", "trainer.sequence_parallel=2"],
        ["model=qwen3_8b", "placement.gpus=8", "trainer.fsdp.replicas=2"],
    ],
)
def test_a_run_takes_the_proposal_and_fits(words):
    found = propose(words)
    plan = make_plan([*words, *found.words])
    assert plan.fits
    assert plan.moments == found.plan.moments
    assert plan.tightest == found.option.tightest
    assert plan.memory.layout.gpus_needed == plan.gpus


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (
            ["model=qwen3_14b", "placement.gpus=4", "placement.gpu_memory=40", "generator.max_context_length=32768"],
            "trainer.tensor_parallel=2",
        ),
        (
            [
                *("model=hf", "model.path=Qwen/Qwen3-30B-A3B", "placement.gpus=8", "placement.gpu_memory=32"),
                "generator.max_context_length=32768",
            ],
            "trainer.expert_parallel=4",
        ),
    ],
)
def test_matrices_or_experts_are_divided_where_that_fits(words, setting):
    found = propose(words)
    assert found.plan.fits and setting in found.words


def test_a_layout_recomputes_as_few_layers_as_fit():
    words = ["model=qwen3_8b", "placement.gpus=8", "trainer.max_tokens_per_microbatch=16384"]
    found = propose(words)
    (setting,) = [word for word in found.words if word.startswith("trainer.recomputed_layers=")]
    fewer = f"trainer.recomputed_layers={int(setting.partition('=')[2]) - 1}"
    assert found.option.tightest.is_comfortable
    rest = [word for word in found.words if word != setting]
    assert not make_plan([*words, *rest, fewer]).tightest.is_comfortable
    given = propose([*words, "trainer.gradient_checkpointing=true"])
    assert {*given.words} == {*rest} - {"trainer.gradient_checkpointing=true"}, "settings of the user are kept"


def test_servers_that_receive_tensors_or_broadcasts_are_where_they_can():
    base = ["model=qwen3_8b", "placement.gpus=8"]
    broadcast = propose([*base, "generator.vllm.weight_sync=distributed"]).option.change
    assert not broadcast["generator.vllm.colocate"]
    tensor = propose([*base, "generator.vllm.weight_sync=tensor"]).option.change
    assert tensor["generator.vllm.colocate"] and tensor["generator.vllm.replicas"] == 1


def test_sequences_are_not_shared_with_an_attention_that_cannot():
    found = propose(["model=gpt_oss_20b", "placement.gpus=8", "generator.max_context_length=131072"])
    assert found.option.change["trainer.sequence_parallel"] == 1 and not found.plan.fits


def test_sequences_are_not_shared_with_a_loss_that_cannot():
    """The loss that balances experts reads whole sequences, and a run with both is refused."""
    words = ["algorithm=gae", "algorithm.expert_balance_coef=0.01", "generator.max_context_length=32768", "model=hf"]
    found = propose([*words, "model.path=Qwen/Qwen3-30B-A3B", "placement.gpus=8", "placement.gpu_memory=24"])
    assert found.option.change["trainer.sequence_parallel"] == 1
    words += ["model.path=Qwen/Qwen3-0.6B", "placement.ranks=4", "placement.gpu_memory=12", "generator=vllm"]
    words += ["generator.vllm.replicas=4", "trainer.max_tokens_per_microbatch=32768"]
    plan = make_plan([*words, "trainer.gradient_checkpointing=true", "trainer.fsdp.param_dtype=bfloat16"])
    assert not plan.fits and "trainer.sequence_parallel" not in (plan.change or {})


def test_settings_inside_of_a_mapping_are_kept():
    words = ["model=qwen3_8b", "placement.gpus=8", "generator.vllm={tensor_parallel_size: 4}"]
    change = propose([*words, "trainer.optimizer={lr: 1e-6, offload: true}"]).option.change
    assert change["generator.vllm.tensor_parallel_size"] == 4
    assert change["trainer.optimizer.offload"] is True


def test_given_numbers_of_ranks_are_combined():
    words = ["model=hf", "model.path=Qwen/Qwen3-30B-A3B", "placement.gpus=8", "placement.machines=2"]
    change = propose([*words, "trainer.tensor_parallel=2", "trainer.expert_parallel=4"]).option.change
    assert (change["trainer.tensor_parallel"], change["trainer.expert_parallel"]) == (2, 4)


def test_idle_gpus_of_other_machines_are_named(capsys):
    words = ["model=qwen3_8b", "placement.gpus=8", "placement.machines=2", "async_config.max_steps_off_policy=2"]
    assert doctor.main(["--propose", *words]) == 0
    idle = 8 - propose(words).option.change["placement.ranks"]
    assert f"warning: {idle} GPUs of the other machines are idle" in capsys.readouterr().out


def test_the_command_is_quoted_for_a_shell(capsys):
    words = ["model=qwen3_8b", "placement.gpus=8", "generator.vllm.env={A: 'x y'}"]
    assert doctor.main(["--propose", *words]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("→ ")]
    assert shlex.split(command)[-len(propose(words).words) - 3 :][:3] == words


def test_settings_of_the_user_are_kept():
    given = {
        "placement.ranks": 4,
        "trainer.sequence_parallel": 2,
        "trainer.optimizer.offload": True,
        "trainer.max_tokens_per_microbatch": 20000,
        "generator.gpu_memory_utilization": 0.85,
        "generator.vllm.tensor_parallel_size": 2,
    }
    words = ["model=qwen3_8b", "placement.gpus=8", *(f"{key}={value}" for key, value in given.items())]
    found = propose(words)
    assert {key: found.option.change[key] for key in given} == given
    assert not {word.partition("=")[0] for word in found.words} & {*given}
    assert found.option.change["generator.vllm.replicas"] == 2


def test_a_long_context_binds_and_what_would_be_preferred_is_named():
    words = ["model=qwen3_32b", "placement.gpus=8", "generator.max_context_length=32768"]
    found = propose(words)
    assert found.plan.fits
    assert "trainer.sequence_parallel=2" in found.words
    assert "trainer.optimizer.offload=true" in found.words
    without = "moments of Adam in main memory, each rank computes alone, all GPUs train: the GPU of a rank is "
    assert any(reason.startswith(without) and "GiB short" in reason for reason in found.reasons)


def test_four_layouts_that_keep_the_states_on_the_gpus_do_not_fit():
    """This is the plan of the layouts themselves."""
    words = ["model=qwen3_32b", "placement.gpus=8", "generator.max_context_length=32768"]
    assert "trainer.optimizer.offload=true" in propose(words).words
    rest = [f"{key}={value}" for key, value in AWAY[""].items()]
    same = ["generator=vllm", "placement.ranks=8", "generator.vllm.colocate=true", "trainer.fsdp.param_dtype=bfloat16"]
    servers = [
        "generator.vllm.tensor_parallel_size=8",
        "generator.vllm.replicas=1",
        "trainer.gradient_checkpointing=true",
    ]
    for parts, share in product((1, 8), (0.3, 0.6)):
        layout = [f"trainer.sequence_parallel={parts}", f"generator.gpu_memory_utilization={share}"]
        tokens = "trainer.max_tokens_per_microbatch=32768"
        assert not make_plan([*words, *rest, *same, *servers, *layout, tokens]).fits


def test_the_least_lacking_layout_is_shown_if_none_fits(capsys):
    assert doctor.main(["--propose", "model=qwen3_32b", "placement.gpus=1", "placement.gpu_memory=39.5"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "mesh: data parallel 1 x sequence parallel 1 x tensor parallel 1" in shown
    assert "all states on the GPUs" in shown


def test_the_page_and_the_json_name_the_same_settings(capsys):
    words = ["model=qwen3_8b", "placement.gpus=8", "placement.machines=2"]
    assert doctor.main(["--propose", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert doctor.main(["--propose", *words]) == 0
    shown = capsys.readouterr().out
    assert " ".join([*words, *found["settings"]]) in shown
    assert "torchrun --nnodes 2 --nproc-per-node 8 -m mtrl.main" in shown
    assert found["plan"]["fits"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=qwen3_8b"], "placement.gpus is not set, .* such as placement.gpus=8$"),
        (["placement.gpus=8"], "model=tiny has under a million parameters"),
        (
            ["model=qwen3_8b", "placement.gpus=8", "placement.ranks=5", "generator.vllm.tensor_parallel_size=4"],
            "no layout .* agrees .*; leave out one of generator.vllm.tensor_parallel_size, placement.ranks$",
        ),
        (
            ["model=qwen3_8b", "placement.gpus=1", "async_config.max_steps_off_policy=2"],
            "async_config.max_steps_off_policy=2 needs a GPU for the servers beside that of a rank",
        ),
        (["model=qwen3_8b", "placement.gpus=8", "model.device=cpu"], "model.device=cpu is not for a layout"),
        (["model=qwen3_8b", "placement.gpus=8", "trainer.lr=1"], "trainer.lr=1 is not a key of mtrl"),
        (["model=qwen3_8b", "placement.gpus=8", "placement.machines=0"], "placement.machines=0 must be at least 1"),
    ],
)
def test_a_wrong_question_is_refused_in_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence):
        propose(words)


def test_the_settings_are_words_of_a_run():
    words = ["model=qwen3_8b", "placement.gpus=8"]
    cfg = merge(normalise([*words, *propose(words).words]))
    assert cfg.generator.vllm.colocate
    assert cfg.placement.ranks == 8
