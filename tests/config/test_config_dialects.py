"""The proposals for settings of other frameworks compose, and have the meaning of the typed setting."""

import pickle
import re
import shlex
from functools import cache
from itertools import product

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from omegaconf import DictConfig, OmegaConf

from mtrl.command.checks import check
from mtrl.command.compose import compose, merge
from mtrl.command.runs import settle
from mtrl.config import foreign
from mtrl.config.dialect_values import VALUES, VALUES_OF_FOREIGN_KEY
from mtrl.config.dialects import FRAMEWORKS
from mtrl.config.keys import find, settings, words
from mtrl.config.messages import unknown_key
from mtrl.config.overrides import CONF, normalise
from mtrl.errors import UserError

SAMPLES = {
    int: ("4", "0", "-1"),
    float: ("0.2", "1.0", "true"),
    bool: ("true", "false"),
    str: ("some/name", "null"),
    list[str]: ("[a,b]", "a"),
    list[int]: ("[1,4]", "4"),
}
"""Usual values of keys by type, and values that do not fit the type."""
WORKING = {
    "plugins": "[json]",
    "parent": "null",
    "model.device": "cpu",
    "environment.name": "gsm8k",
    "environment.target": "null",
    "environment.opponent_path": "null",
    "environment.resources.memory": "2GiB",
    "distillation.teacher.url": "null",
    "placement.name": "null",
    "reward.scheme": "default",
    "generator.agent.target": "null",
    "generator.agent.command": "[python,a.py]",
    "generator.agent.url": "'http://127.0.0.1:9'",
    "tracker.mlflow.uri": "sqlite:///x.db",
    "tracker.report_to": "[]",
}
"""Keys of the program's own that name something that has to be there -> a value that works on this machine."""
RS = "algorithm.rollout_correction.rollout_rs"
ENTRIES = [(name, theirs) for name, table in FRAMEWORKS.items() for theirs in table]


def proposal(theirs: str, value: str, framework: str | None = None) -> list[str]:
    """Return the proposal for `theirs=value` as words of a shell, empty if a sentence explains what to do."""
    name = framework or next(name for name, table in FRAMEWORKS.items() if theirs in table)
    said = foreign.ForeignKey(name, theirs, FRAMEWORKS[name][theirs]).proposal(value)
    return shlex.split(said) if said else []


def values_for(key: str) -> tuple[str, ...]:
    """Return usual values of a key of mtrl, in the words of every framework, and values that do not fit it."""
    if key in WORKING:
        return (WORKING[key], "null")
    known = find(key) if " " not in key else None
    fitting = SAMPLES.get(known and known.type, (*SAMPLES[str], "[0.9,0.99]", "0.9", "true", "false"))
    return (*VALUES.get(key, {}), *words(key), *fitting)


def proposals() -> dict[str, str]:
    """Return the typed setting of every proposal, for every key of the tables with all its usual values."""
    found = {}
    for name, theirs in ENTRIES:
        for value in (*values_for(FRAMEWORKS[name][theirs].partition("=")[0]), *VALUES_OF_FOREIGN_KEY.get(theirs, {})):
            said = foreign.ForeignKey(name, theirs, FRAMEWORKS[name][theirs]).proposal(value)
            if said:
                found.setdefault(said, f"{theirs}={value}")
    return found


def guesses() -> dict[str, str]:
    """Return the same for keys that are in no table: keys of mtrl without a section, in a wrong one, or misspelt."""
    found = {}
    for key in settings():
        leaf = key.rpartition(".")[2]
        for typed, value in product((leaf, f"elsewhere.{leaf}", f"{leaf}x", f"{key}x"), values_for(key)):
            said = "" if find(typed) else str(unknown_key(typed, value))
            for proposed in re.findall(r"did you mean ([\w.]+=.+)\?$|write ([\w.]+=\S+.*)$", said):
                found.setdefault("".join(proposed), f"{typed}={value}")
    return found


@cache
def plain() -> bytes:
    """Return the default configuration, pickled, because a copy by `copy.deepcopy` takes five times as long."""
    return pickle.dumps(merge([]))


def composed(words: list[str]) -> DictConfig:
    """Return the configuration that `compose` makes, without reading the files of all groups again if
    no other group is chosen."""
    overrides = OverridesParser.create().parse_overrides(normalise(words))
    if any((CONF / override.key_or_group).is_dir() for override in overrides):
        return compose(words)
    cfg = pickle.loads(plain())
    for override in overrides:
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=override.is_force_add())
    settle(cfg)
    check(cfg)
    return cfg


NOT_HERE = (
    *("does not exist", "there is no run in", "in a virtual environment of its own"),
    *("nothing to compare", "has only environment with a weight", "needs a task with several roles"),
    *("leaves no room for a prompt", "model=hf needs model.path", "does not divide the number of ranks"),
    *("counts the mismatch twice", "leaves algorithm.loss_fn=decoupled_ppo nothing to decouple"),
    *(
        "is not what algorithm.advantage_method=turn_rloo has",
        "rotary positions",
        "a cost needs input and output",
        "divides by a constant",
        "in USD per million",
    ),
)
"""Refusals of what is right by itself: a file, run or engine that this machine lacks, and settings that need another
one, which the refusal names."""


@pytest.mark.ci
def test_every_proposal_composes_with_the_proposed_value():
    """Every key of the tables, and wrong keys like ours, with every value that people give: all checks pass."""
    proposed = {**guesses(), **proposals()}
    assert len(proposed) > 150
    for said, typed in proposed.items():
        try:
            cfg = composed(shlex.split(said))
        except UserError as error:
            assert any(words in str(error) for words in NOT_HERE), f"{typed} -> {said}: {error}"
            continue
        for override in OverridesParser.create().parse_overrides(shlex.split(said)):
            known, value = find(override.key_or_group), override.value()
            if known and not known.is_section and "${" not in said:
                held = OmegaConf.select(cfg, known.path)
                assert held == (value.text if isinstance(value, QuotedString) else value), f"{typed} -> {said}: {held}"


@pytest.mark.parametrize(
    "words", [["seed=4"], ["generator.eval_sampling_params.temperature=0.5"], ["algorithm.extra.a=1"], ["resume=none"]]
)
def test_the_short_way_to_compose_gives_the_same(words):
    words = [*words, "run_dir=x"]
    assert composed(words) == compose(words) != composed(["run_dir=x", "seed=5"])


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
        (RS, "token", ["algorithm.off_policy_correction=icepop", "algorithm.loss_anchor=old"]),
        (RS, "sequence", ["algorithm.off_policy_correction=mis"]),
        (RS, "geometric", ["algorithm.off_policy_correction=geometric"]),
        (RS, "seq_max_k2", []),
        (
            "algorithm.rollout_correction.rollout_is",
            "token",
            ["algorithm.off_policy_correction=tis", "algorithm.loss_anchor=old"],
        ),
        ("algorithm.filter_groups.max_num_gen_batches", "10", ["algorithm.dynamic_sampling_rounds=10"]),
        ("algorithm.filter_groups.max_num_gen_batches", "0", []),
        ("trainer.algorithm.dynamic_sampling.max_sample_batches", "-1", []),
        ("trainer.algorithm.use_tis", "false", ["algorithm.off_policy_correction=none"]),
        ("trainer.algorithm.use_tis", "true", []),
        ("vllm_importance_sampling_correction", "False", ["algorithm.off_policy_correction=none"]),
        ("max_tool_calling_iterations", "4", ["generator.max_turns=5"]),
        ("max_tool_calling_iterations", "0", ["generator.max_turns=1"]),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", "4", ["generator.max_turns=5"]),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns", "0", []),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "4", ["generator.max_turns=4"]),
        ("adam_beta1", "0.85", ["trainer.optimizer.betas=[0.85,0.999]"]),
        ("adam_beta2", "0.95", ["trainer.optimizer.betas=[0.9,0.95]"]),
        ("run_name", "my run", ["name=my run"]),
        ("environment.env_class", "text2sql", ["experiment=text_to_sql"]),
        ("environment.env_class", "my_own", []),
    ],
)
def test_a_proposal_means_the_typed_value(theirs, value, ours):
    """Some settings have no proposal but a sentence: for example, a number of samples is no number of tokens."""
    assert proposal(theirs, value) == ours
    if ours and theirs != "use_vllm":  # vLLM may not be installed
        compose(ours)


def test_a_file_of_rows_in_a_list_of_one(tmp_path):
    rows = tmp_path / "rows.parquet"
    rows.touch()
    assert proposal("data.train_data", f"[{rows}]") == [f"data.path={rows}"]
    compose([f"data.path={rows}"])


def test_dr_grpo_proposals_include_the_divisor():
    cfg = compose(proposal("loss_type", "dr_grpo"))
    assert cfg.algorithm.max_sequence_length == cfg.generator.sampling_params.max_generate_length


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("deepspeed=zero3", "FSDP2"),
        ("gradient_accumulation_steps=4", "not by a number of samples"),
        ("custom_reward_function.path=r.py", "environment:0"),
        ("agent_config=arn:x", "generator.agent.url"),
        ("torch_dtype=auto", "set model.dtype, one of float32, bfloat16"),
        ("sed=zero3", "did you mean seed?"),
        ("sampling_max_tokens=2048", "write generator.sampling_params.max_generate_length=2048"),
        ("sampling_top_p=0.9", "write generator.sampling_params.top_p=0.9"),
        ("colocate_all=false", "set generator.vllm.colocate=false or generator.sglang.colocate=false"),
        ("colocate_all=true", "set generator.vllm.colocate=true or generator.sglang.colocate=true"),
        ("reward_model.overlong_buffer.enable=false", "leave reward.components.length_penalty out"),
        ("algorithm.filter_groups.max_num_gen_batches=0", "it is no limit there, and 0 is off here"),
        ("data.train_data=[a.parquet,b.parquet]", "put the files into a folder as train-1.parquet, train-2.parquet"),
        ("custom_reward_function.name=f", "set reward.components="),
        ("reward_model.enable=true", "set reward.components="),
        ("rollout.mode=async", "leave it out"),
        ("micro_batch_size=4", "filled by tokens, not by a number of samples"),
        ("elsewhere.mode=async", "did you mean tracker.wandb.mode?"),
        ("path=x", "did you mean data.path?"),
        ("loss_fn=is", "did you mean algorithm.loss_fn=importance_sampling?"),
        ("advantage_method=reinforce++", "did you mean algorithm.advantage_method=reinforce_pp?"),
        ("loss_reduction=token-mean", "did you mean algorithm.loss_reduction=token_mean?"),
        ("dtype=bf16", "did you mean model.dtype=bfloat16?"),
        ("backend=hf", "did you mean generator.backend=local?"),
        ("schedule=linear_with_warmup", "did you mean trainer.optimizer.schedule=linear?"),
        ("kl_estimator=low_var_kl", "did you mean algorithm.kl_estimator=k3?"),
        ("loss_fn=my.module.loss", "did you mean algorithm.loss_fn=my.module.loss?"),
        ("loss_fn=zzz", "did you mean algorithm.loss_fn? It takes one of ppo, cispo,"),
        ("group_sze=eight", "did you mean algorithm.group_size? It takes an integer"),
        ("algorithm.loss_fn=is", "write algorithm.loss_fn=importance_sampling"),
    ],
)
def test_the_sentences(typed, said):
    with pytest.raises(UserError) as caught:
        compose([typed])
    assert said in str(caught.value)
