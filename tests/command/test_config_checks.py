"""Checks across keys: errors before any work, or warnings."""

import subprocess
import sys

import pytest

from mtrl.command.checks import check, check_training, ignored
from mtrl.command.compose import compose, merge
from mtrl.command.hints import training_hints
from mtrl.config.overrides import normalise
from mtrl.datasets import load_rows
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.tools import ToolEnvironment
from mtrl.errors import UserError


def warnings(*overrides: str) -> list[str]:
    return check(compose(overrides))


def test_the_experiments_as_they_are_warn_of_nothing():
    assert warnings() == []
    assert warnings("experiment=text_to_sql", "debug=fast") == []


class WithoutScorer(BaseEnvironment):
    """An environment whose success is a sum of rewards."""


def test_components_beside_a_success_by_the_reward_give_a_warning():
    target = ["environment.name=x", f"environment.target={__name__}.WithoutScorer"]
    found = check(merge([*target, "+reward.components.turn_penalty=0.01"]))
    assert any("has no scorer of its own" in text and "all of reward.components" in text for text in found)
    assert not any("scorer" in text for text in check(merge(target)))
    assert not any("scorer" in text for text in warnings("experiment=gsm8k", "+reward.components.turn_penalty=0.01"))


class Calculating(ToolEnvironment):
    """An environment with the constructor of `ToolEnvironment`."""


class Reading(WithoutScorer):
    """An environment whose rows depend on `environment.config`."""

    @staticmethod
    def load(data, seed, **config):
        return load_rows(data, seed)


def test_keys_that_an_own_class_ignores_give_a_warning():
    def found(name, *overrides):
        words = ["environment.name=x", f"environment.target={__name__}.{name}", *overrides]
        return ignored(merge(words), words)

    (text,) = found("WithoutScorer", "+environment.config.stpes=3")
    assert text.startswith("environment.config.stpes=3 has no effect: WithoutScorer has neither an __init__ nor a load")
    (text,) = found("Calculating", "+environment.config.max_tool_calls=3", "+environment.config.more={a:3}")
    assert text.startswith("environment.config.more={a:3} has no effect")
    assert found("Reading", "+environment.config.stpes=3") == found("WithoutScorer") == []


def test_an_empty_mapping_that_empties_nothing_gives_a_warning():
    def found(word):
        words = normalise([word])
        return ignored(merge(words), words)

    (text,) = found("reward.components={}")
    assert text.startswith("reward.components={} has no effect: a mapping changes the keys that it names")
    assert found("data.sampler_config={}") == [], "it is empty already"
    assert found("generator.eval_sampling_params={}") == [], "it creates the section"


def test_a_key_of_the_warm_start_that_a_policy_does_not_have_gives_a_warning():
    def found(*words):
        return ignored(merge([*words, "model.path=folder"]), words)

    key = "model.warm_start.lr=1e-4"
    (text,) = found("model=hf", key, "debug=fast", "model.warm_start.enabled=false")
    assert text.startswith("model.warm_start.lr=1e-4 has no effect with model.warm_start.enabled=false; set it to true")
    assert found("model=hf", key, "model.warm_start.enabled=true") == found(key) == []
    assert found("model=hf", "debug=fast") == []


def test_sglang_without_conversations_raises_the_error_of_the_guide():
    with pytest.raises(NotImplementedError) as caught:
        compose(["generator.backend=sglang", "generator.use_conversation_multi_turn=false"])
    assert str(caught.value) == "`use_conversation_multi_turn=False` is not supported for SGLang backend"
    assert type(caught.value) is NotImplementedError


REFUSED = [
    *(
        (
            [f"{key}=s3://bucket/folder"],
            f"{key}={seen} is an address, and results are written to folders of this machine; name a "
            "folder, and copy it when the command has ended",
        )
        for key, seen in (("run_dir", "s3:/bucket/folder"), ("evaluation.output", "s3://bucket/folder"))
    ),
    (
        ["generator.backend=vlm"],
        "generator.backend=vlm is not known; did you mean vllm? Choose one of local, vllm, sglang",
    ),
    (
        ["async_config.max_steps_off_policy=1", "generator.local.deterministic=true"],
        "generator.local.deterministic=true lets turns wait for each other, and async_config.max_steps_off_policy=1 "
        "lets nothing wait; set generator.local.deterministic=null, or async_config.max_steps_off_policy=0",
    ),
    (
        ["trainer.fsdp.replicas=2"],
        "trainer.fsdp.replicas=2 does not divide the number of ranks, 1; set it to 1, or let torchrun start a multiple "
        "of it",
    ),
    (
        ["trainer.sequence_parallel=2"],
        "trainer.sequence_parallel=2 does not divide the number of ranks, 1; set it to 1, or let torchrun start a "
        "multiple of it",
    ),
    *(
        (
            [f"model.warm_start.success_band={band}"],
            f"model.warm_start.success_band={seen} must be two numbers from 0 to 1, the lower limit first; write "
            "[0.3,0.5]",
        )
        for band, seen in (("[0.5,0.3]", "[0.5,0.3]"), ("[30,50]", "[30.0,50.0]"), ("[0.5]", "[0.5]"))
    ),
    (
        ["model.tiny.hidden_size=100"],
        "model.tiny.hidden_size=100 and model.tiny.heads=4 give each head a size of 25, and rotary positions need an "
        "even size; set model.tiny.hidden_size=96",
    ),
    (["async_config.on_stale=drop"], "async_config.on_stale=drop is not known; choose one of wait, requeue"),
    (
        ["trainer.mini_batches=3"],
        "trainer.mini_batches=3 does not divide trainer.prompts_per_step=16, and the trajectories of a prompt stay "
        "together; set it to 2",
    ),
    (
        ["generator.max_context_length=64"],
        "generator.sampling_params.max_generate_length=64 leaves no room for a prompt in "
        "generator.max_context_length=64; lower the first or raise the second",
    ),
    (
        ["generator.context.fold=keep_last", "generator.context.threshold=200", "generator.max_context_length=200"],
        "generator.context.threshold=200 is not below the 200 tokens at which an episode ends; lower it, or raise "
        "generator.max_context_length",
    ),
    (
        ["generator.context.fold=summarise", "generator.use_conversation_multi_turn=false"],
        "generator.context.fold=summarise needs every turn as a message of its own; set "
        "generator.use_conversation_multi_turn=true, or generator.context.fold=none",
    ),
    (
        ["generator.sampling_params.temperature=0"],
        "generator.sampling_params.temperature=0.0 must be above 0 "
        "(greedy trajectories of one prompt are all the same and teach nothing)",
    ),
    (
        ["model=hf"],
        "model=hf needs model.path; write model.path=FOLDER or a Hub name such as Qwen/Qwen2.5-0.5B-Instruct",
    ),
    (
        ["evaluation.pass_k_values=[1,4]"],
        "evaluation.pass_k_values=[1,4] must lie from 1 to evaluation.samples_per_row=1; leave 4 out, "
        "or set evaluation.samples_per_row=4",
    ),
    (
        ["data.path=/nowhere/rows"],
        "data.path=/nowhere/rows does not exist; write an existing folder or file, or a Hub name owner/name",
    ),
    (
        ["environment.config.calculatr=true"],
        "environment.config.calculatr is not a key of gsm8k; did you mean environment.config.calculator? "
        "It has calculator, operations",
    ),
    (["reward.scheme=skyrl"], "reward.scheme=skyrl is not known; choose one of default, guide"),
    (
        ["trainer.optimizer.schedule=cosin"],
        "trainer.optimizer.schedule=cosin is not known; did you mean cosine? Choose one of constant, linear, cosine",
    ),
    (
        ["trainer.optimizer.betas=[0.9]"],
        "trainer.optimizer.betas=[0.9] must be two numbers from 0 to below 1; write [0.9,0.95]",
    ),
    (["trainer.prompts_per_step=0"], "trainer.prompts_per_step=0 must be at least 1"),
    (["diagnosis.window=4"], "diagnosis.window=4 must be at least 5"),
    (["diagnosis.live=maybe"], "diagnosis.live=maybe is not known; choose one of warn, stop, none"),
    (
        ["evaluation.split=tset"],
        "evaluation.split=tset is not known; did you mean test? Choose one of test, validation, train",
    ),
    (["evaluation.confidence=95"], "evaluation.confidence=95.0 must be below 1 (0.95 is the usual level)"),
    (
        ["evaluation.rows=0", "evaluation.sampled_rows=0"],
        "evaluation.rows=0 must be at least 1 (every evaluation runs them, greedily)",
    ),
    (["algorithm.entropy_coef=nan"], "algorithm.entropy_coef=nan must be a finite number"),
    (["algorithm.turn_advantage_coef=-inf"], "algorithm.turn_advantage_coef=-inf must be a finite number"),
    (["evaluation.success_threshold=inf"], "evaluation.success_threshold=inf must be a finite number"),
    (["evaluation.endpoint.timeout=0"], "evaluation.endpoint.timeout=0.0 must be above 0"),
    (
        ["~environment", "experiment=null"],
        "environment.name has no value, and gsm8k needs one; write environment.name=...",
    ),
    (
        ["environment.target=nowhere.Env"],
        "environment.target=nowhere.Env cannot be imported (No module named 'nowhere'); write package.module.Name, "
        "of the folder where you start or installed",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_refused(overrides, said):
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.attn_implementation=eager"],
            "trainer.sequence_parallel=4 works with model.attn_implementation=sdpa, and it is eager; set it to sdpa, "
            "or trainer.sequence_parallel=1",
        ),
        (
            ["model.tiny.heads=2"],
            "trainer.sequence_parallel=4 does not divide model.tiny.heads=2; set the heads to a multiple of 4, or "
            "trainer.sequence_parallel=1",
        ),
    ],
)
def test_sequences_are_not_shared(overrides, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    compose(["trainer.sequence_parallel=4"])
    with pytest.raises(UserError) as caught:
        compose(["trainer.sequence_parallel=4", *overrides])
    assert str(caught.value) == said


BESIDE = {
    "model.lora_rank=4": "model.lora_rank=4; set model.lora_rank=0",
    "trainer.compile=true": "trainer.compile=true; set trainer.compile=false",
    "trainer.sequence_parallel=2": "trainer.sequence_parallel=2; set trainer.sequence_parallel=1",
    "algorithm.advantage_method=gae": "the critic of gae; set algorithm.advantage_method=turn_rloo",
}
"""What the message says about each setting."""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trainer.tensor_parallel=3"],
            "trainer.tensor_parallel=3 does not divide the number of ranks of a copy of the model, 4; set it to 1, or "
            "let torchrun start a multiple of 3",
        ),
        (
            ["trainer.expert_parallel=4", "trainer.fsdp.replicas=2", "model=hf", "model.path=owner/name"],
            "trainer.expert_parallel=4 does not divide the number of ranks of a copy of the model, 2; set it to 1, or "
            "let torchrun start a multiple of 8",
        ),
        (
            ["trainer.tensor_parallel=4", "trainer.expert_parallel=2", "model=hf", "model.path=owner/name"],
            "trainer.expert_parallel=2 is no multiple of trainer.tensor_parallel=4; set it to a multiple, or to 1",
        ),
        (
            ["trainer.expert_parallel=2"],
            "trainer.expert_parallel=2: model=tiny has no experts; set trainer.expert_parallel=1",
        ),
        (
            ["trainer.tensor_parallel=4", "model.tiny.heads=2"],
            "trainer.tensor_parallel=4 does not divide model.tiny.heads=2; set the heads to a multiple of 4, or "
            "trainer.tensor_parallel=1",
        ),
        *(
            (
                ["trainer.tensor_parallel=2", word],
                f"trainer.tensor_parallel=2 does not work with {said}, or trainer.tensor_parallel=1",
            )
            for word, said in BESIDE.items()
        ),
    ],
)
def test_models_are_not_divided(overrides, said, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    compose(["trainer.tensor_parallel=2"])
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert str(caught.value) == said


def test_a_task_that_keeps_the_default_experiment_names_its_own_experiment():
    with pytest.raises(UserError, match="to change the whole task write experiment=text_to_sql"):
        compose(["environment=text_to_sql"])


@pytest.mark.parametrize("alias", ["grpo", "group_based"])
def test_the_services_name_of_grpo_is_accepted(alias):
    assert compose([f"algorithm.advantage_method={alias}"]).algorithm.advantage_method == alias


@pytest.mark.parametrize(
    "name",
    [
        *("monte_carlo", "group_based", "group_based_per_turn", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
        *("opo", "grpo_passk", "gpg"),
    ],
)
def test_every_method_of_the_managed_service_composes_by_its_name(name):
    assert warnings(f"algorithm.advantage_method={name}") == []


def test_a_hub_name_needs_no_folder_and_a_folder_is_looked_for(tmp_path):
    assert compose(["data.path=owner/name"]).data.path == "owner/name"
    assert compose([f"data.path={tmp_path}"]).data.path == str(tmp_path)


WARNED = [
    (["model.path=/x"], "model.path=/x has no effect with model=tiny, which is built here; add model=hf"),
    (
        ["model=hf", "model.path=owner/name", "trainer.optimizer.lr=0.001"],
        "trainer.optimizer.lr=0.001 is high for a pretrained model, which usually takes 1e-6",
    ),
    (
        ["evaluation.rows=1000"],
        "evaluation.rows=1000 is limited to data.max_test_rows=256; raise that as well",
    ),
    (
        ["tracker.project=x"],
        "tracker.project=x has no effect with tracker.report_to=[]",
    ),
    (
        ["generator.context.fold=summarise", "generator.context.keep_observations=1"],
        "generator.context.keep_observations has no effect with generator.context.fold=summarise",
    ),
    (["generator.context.threshold=9"], "generator.context.threshold has no effect with generator.context.fold=none"),
    (
        ["evaluation.samples_per_row=8", "evaluation.sampled_rows=0"],
        "evaluation.samples_per_row=8 has no effect with evaluation.sampled_rows=0, which samples no row",
    ),
    (["tracker.wandb.entity=x"], "tracker.wandb.entity=x has no effect with tracker.report_to=[]"),
    (["trainer.profile_step=101"], "trainer.profile_step=101 has no effect with fewer steps (trainer.max_steps)"),
    (
        ["trainer.optimizer.warmup_steps=101"],
        "trainer.optimizer.warmup_steps=101 is more than trainer.max_steps=100, so the learning rate stays below "
        "trainer.optimizer.lr=0.0004; lower the first or raise the second",
    ),
    (
        ["algorithm=gae", "algorithm.critic.optimizer.min_lr_ratio=0.5"],
        "algorithm.critic.optimizer.min_lr_ratio=0.5 has no effect with a constant schedule",
    ),
    (
        ["algorithm=gae", "algorithm.critic.warmup_steps=9", "trainer.optimizer.warmup_steps=9"],
        "trainer.optimizer.warmup_steps=9 has no effect with algorithm.critic.warmup_steps of as many steps or more, "
        "in which the policy is not trained",
    ),
    (
        ["objective=sucess_after"],
        "objective=sucess_after is not one of the keys that every summary.json holds; did you mean success_after?",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), WARNED, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_warned(overrides, said):
    assert warnings(*overrides) == [said]


def test_sampled_evaluations_need_sampled_rows():
    values = "evaluation.pass_k_values=[1,4,8] has no effect with evaluation.sampled_rows=0, which samples no row"
    assert values in warnings("evaluation=pass_at_8", "evaluation.sampled_rows=0")
    assert warnings("evaluation=pass_at_8") == warnings("evaluation.sampled_rows=0") == []


def test_training_warns_about_keys_of_the_evaluator():
    cfg = merge(normalise(["evaluation.compare=[base]", "evaluation.endpoint.retries=1"]))
    assert check(cfg) == []
    assert training_hints(cfg) == [
        "evaluation.compare=[base] has no effect on training; mtrl evaluate reads it",
        "evaluation.endpoint.retries=1 has no effect on training; mtrl evaluate reads it",
    ]


@pytest.mark.parametrize("path", ["/nope", "./nope", "~/nope", "~nobody-here/nope"])
def test_training_needs_the_folder_of_its_model(path):
    cfg = merge(normalise(["model=hf", f"model.path='{path}'"]))
    check(cfg)  # an evaluation of the run's export needs none
    with pytest.raises(UserError, match=f"model.path={path} does not exist; name an existing folder, or a Hub name"):
        check_training(cfg)


def test_the_folder_of_a_model_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    check_training(merge(normalise(["model=hf", "model.path='~/mine'"])))


def test_the_folder_of_data_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    check(merge(normalise(["data.path='~/mine'"])))
    with pytest.raises(UserError, match="data.path=~nobody-here/mine does not exist"):
        check(merge(normalise(["data.path='~nobody-here/mine'"])))


def test_checking_needs_no_torch():
    code = (
        "import sys, mtrl.main\nfrom mtrl.command.compose import compose\ncompose(['experiment=text_to_sql'])\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_composing_alone_does_not_check():
    """`merge` is used by `--cfg job`, which also shows configurations that cannot run."""
    assert merge(normalise(["algorithm.group_size=1"])).algorithm.group_size == 1
