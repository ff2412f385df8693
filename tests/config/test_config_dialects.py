"""What is proposed for another framework's setting composes, and means what was typed."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from omegaconf import OmegaConf

from mtrl.config import foreign
from mtrl.config.compose import compose
from mtrl.config.dialect_values import VALUES
from mtrl.config.dialects import FRAMEWORKS
from mtrl.config.keys import find
from mtrl.errors import UserError

SAMPLES = {
    int: ("4", "0", "-1"),
    float: ("0.2", "1.0", "true"),
    bool: ("true", "false"),
    str: ("some/name", "null"),
    list[str]: ("[a,b]", "a"),
    list[int]: ("[1,4]", "4"),
}
"""What people give to keys of a type, and what does not fit it."""
ENTRIES = [(name, theirs) for name, table in FRAMEWORKS.items() for theirs in table]


def proposal(theirs: str, value: str, framework: str | None = None) -> list[str]:
    """What is proposed for `theirs=value`, as a shell splits it; nothing where a sentence says what to do."""
    name = framework or next(name for name, table in FRAMEWORKS.items() if theirs in table)
    said = foreign.Found(name, theirs, FRAMEWORKS[name][theirs]).proposal(value)
    return shlex.split(said) if said else []


def proposals() -> dict[str, str]:
    """Every proposal for every key of the tables with every value that people give it -> what they typed."""
    found = {}
    for name, theirs in ENTRIES:
        ours = FRAMEWORKS[name][theirs].partition("=")[0]
        known = find(ours) if " " not in ours else None
        values = (
            *VALUES.get(ours, {}),
            *SAMPLES.get(known and known.type, (*SAMPLES[str], "[0.9,0.99]", "0.9", "true")),
        )
        for value in values:
            said = foreign.Found(name, theirs, FRAMEWORKS[name][theirs]).proposal(value)
            if said:
                found.setdefault(said, f"{theirs}={value}")
    return found


NOT_HERE = (
    *("does not exist", "there is no run in", "in a virtual environment of its own"),
    *("nothing to compare", "has only environment with a weight"),
    "leaves no room for a prompt",
)
"""Refusals of what is right by itself: a file, run or engine that this machine lacks, and two that need another key."""


def test_whatever_is_proposed_composes_and_holds_what_it_says():
    """Every key of the tables with every value that people give it, all checks of a run passed."""
    proposed = proposals()
    assert len(proposed) > 150
    for said, typed in proposed.items():
        try:
            cfg = compose(shlex.split(said))
        except UserError as error:
            assert any(words in str(error) for words in NOT_HERE), f"{typed} -> {said}: {error}"
            continue
        for override in OverridesParser.create().parse_overrides(shlex.split(said)):
            known, value = find(override.key_or_group), override.value()
            if known and not known.is_section and "${" not in said:
                held = OmegaConf.select(cfg, known.path)
                assert held == (value.text if isinstance(value, QuotedString) else value), f"{typed} -> {said}: {held}"


@pytest.mark.parametrize(
    ("theirs", "value", "ours"),
    [
        ("report_to", "wandb", ["tracker.report_to=[wandb]"]),
        ("report_to", "none", ["tracker.report_to=[]"]),
        ("trainer.logger", '["console","wandb"]', ["tracker.report_to=[wandb]"]),
        ("trainer.logger", "swanlab", []),
        ("use_vllm", "true", ["generator.backend=vllm"]),
        ("use_vllm", "false", ["generator.backend=local"]),
        ("bf16", "true", ["model.dtype=bfloat16"]),
        ("bf16", "False", ["model.dtype=float32"]),
        ("trainer.flash_attn", "false", ["model.attn_implementation=sdpa"]),
        ("use_bias_correction_kl", "false", ["algorithm.kl_estimator=k3"]),
        ("trainer.micro_train_batch_size_per_gpu", "4", []),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "4", []),
        ("gradient_accumulation_steps", "4", []),
        ("per_device_train_batch_size", "8", []),
        ("agent_config", "arn:aws:lambda:us-east-1:1:function:x", []),
        ("custom_reward_function.path", "my/reward.py", []),
        ("deepspeed", "zero3", []),
        ("data.train_data", "[a.parquet,b.parquet]", []),
        ("trainer.save_freq", "-1", ["trainer.checkpoint.every_steps=0"]),
        ("data.train_max_samples", "-1", ["data.max_train_rows=null"]),
        ("torch_dtype", "auto", []),
        ("model_name_or_path", "Qwen/Qwen3-0.6B", ["model.path=Qwen/Qwen3-0.6B", "model=hf"]),
        (
            "val_metrics_config.pass_k_values",
            "[1,4]",
            ["evaluation.pass_k_values=[1,4]", "evaluation.samples_per_row=4"],
        ),
        ("environment.env_class", "text2sql", ["experiment=text_to_sql"]),
        ("environment.env_class", "my_own", []),
    ],
)
def test_it_means_what_was_typed(theirs, value, ours):
    """Nothing is proposed where a sentence has to say it: a count of samples is no count of tokens."""
    assert proposal(theirs, value) == ours
    if ours and theirs != "use_vllm":  # vLLM may not be installed
        compose(ours)


def test_a_file_of_rows_in_a_list_of_one(tmp_path):
    rows = tmp_path / "rows.parquet"
    rows.touch()
    assert proposal("data.train_data", f"[{rows}]") == [f"data.path={rows}"]
    compose([f"data.path={rows}"])


def test_what_dr_grpo_divides_by_comes_with_it():
    cfg = compose(proposal("loss_type", "dr_grpo"))
    assert cfg.algorithm.max_sequence_length == cfg.generator.sampling_params.max_generate_length


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("deepspeed=zero3", "FSDP2"),
        ("gradient_accumulation_steps=4", "not by a number of samples"),
        ("custom_reward_function.path=r.py", "environment:0"),
        ("agent_config=arn:x", "generator.agent.url"),
        ("torch_dtype=auto", "set model.dtype, one of float32, bfloat16, float16"),
        ("sed=zero3", "did you mean seed?"),
        ("sampling_max_tokens=2048", "write generator.sampling_params.max_generate_length=2048"),
        ("sampling_top_p=0.9", "write generator.sampling_params.top_p=0.9"),
        ("algorithm.loss_fn=is", "write algorithm.loss_fn=importance_sampling"),
    ],
)
def test_the_sentences(typed, said):
    with pytest.raises(UserError) as caught:
        compose([typed])
    assert said in str(caught.value)
