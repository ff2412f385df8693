"""Every proposal can be run: it composes with the configuration of the run and changes it."""

import pytest
from ill_runs import RUNS
from made_up_runs import configured
from omegaconf import OmegaConf

from mtrl.command.compose import compose, merge
from mtrl.config.overrides import normalise
from mtrl.diagnose.command import words_of
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.walk import RULES

COMPOSED = set()
"""Rules share proposals."""


def settled(config, *words, tried=()):
    finding = Finding(Severity.NOTE, "x", proposals=(Proposal(words, "why"),))
    return Proposals(config, tried).settle(finding).proposals


@pytest.mark.parametrize("name", RUNS)
def test_every_proposal_of_every_rule_composes(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = RUNS[name]()
    asked = next(rule for rule in RULES if rule.name == name).check(run)
    for proposal in Proposals(run.config).settle(asked).proposals:
        if (proposal.words, str(run.config)) in COMPOSED:
            continue
        COMPOSED.add((proposal.words, str(run.config)))
        cfg = compose([*words_of(run.config, proposal.words), *proposal.words])
        for word, was in zip(proposal.words, proposal.current, strict=True):
            key, _, value = word.partition("=")
            assert was.startswith(f"{key}=") and was != word
            assert OmegaConf.select(cfg, key) == OmegaConf.from_dotlist([f"x={value}"]).x


def test_a_current_setting_is_not_proposed():
    assert settled(configured(), "algorithm.group_size=8") == ()
    (left,) = settled(configured(), "algorithm.group_size=4", "trainer.prompts_per_step=16")
    assert left.words == ("algorithm.group_size=4",) and left.current == ("algorithm.group_size=8",)


def test_a_refused_setting_is_not_proposed():
    assert settled(configured(), "generator.tensor_parallel=0") == ()
    assert settled(configured(), "reward.scheme=no_such_scheme") == ()
    assert settled(configured(), "trainer.no_such_key=1") == ()


def test_numbers_are_compared_as_numbers():
    assert settled(configured(), "trainer.optimizer.lr=0.0004") == ()
    assert settled(configured(), "trainer.optimizer.lr=4e-4") == ()


def test_a_change_without_effect_in_the_lineage_is_not_proposed_again():
    words = ("algorithm.group_size=4", "trainer.prompts_per_step=32")
    assert settled(configured(), *words)
    assert settled(configured(), *words, tried=[words]) == ()
    assert settled(configured(), *words, tried=[("algorithm.group_size=4",)])


def test_a_configuration_that_cannot_be_checked_here_still_gets_proposals():
    """Its data was on another machine."""
    assert settled(configured(data={"path": "/nowhere/at/all"}), "algorithm.group_size=4")


def test_a_configuration_of_another_version_still_gets_proposals():
    assert settled(configured(trainer__gone=1, unknown={"x": 1}), "generator.max_turns=6")
    assert settled(configured(seed={"x": 1}, data="x", plugins={"x": 1}), "generator.max_turns=6")


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=games", "trainer.optimizer.lr=1e-3", "environment.config.game=maze"],
        ["experiment=triviaqa", "reward=mt_grpo", "algorithm=cispo"],
        ["experiment=gsm8k", "reward.components.environment=0", "reward.components.correct=1", "name=other name"],
        ["experiment=search", "evaluation.pass_k_values=[1,2]", "evaluation.samples_per_row=2"],
        ["generator.sampling_params.stop=['</a>','b, c']", "generator.eval_sampling_params.top_k=5"],
    ],
)  # fmt: skip
def test_the_command_reproduces_the_configuration(overrides, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ran = OmegaConf.to_container(compose(overrides), resolve=True)
    again = OmegaConf.to_container(merge(normalise(words_of(ran))), resolve=True)
    ran.pop("run_dir"), again.pop("run_dir")
    assert again == ran


def test_the_command_reproduces_names_that_are_no_part_of_a_dotted_key():
    """Hydra refused `reward.components.judge.options.two words=1`."""
    components = {"environment": 1.0, "judge": {"weight": 0.5, "options": {"two words": 1, "a:b": {"c=d, e": ["x y"]}}}}
    words = words_of(configured(reward__components=components))
    assert OmegaConf.to_container(merge(normalise(words)).reward.components) == components
