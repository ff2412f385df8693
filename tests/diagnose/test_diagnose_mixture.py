"""Rules about settings that the sources of a mixture set themselves: they name and propose the keys that are read."""

import numpy as np
import pytest
from ill_runs import FLAT, RISING, noisy, of
from made_up_runs import configured
from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.mixture import source_configs
from mtrl.diagnose.command import words_of
from mtrl.diagnose.finding import Finding, Proposal, Severity
from mtrl.diagnose.proposals import Proposals
from mtrl.diagnose.views import MAX_TURNS, values_of
from mtrl.diagnose.walk import RULES

OUT_OF_TURNS = {"rollout/stop/max_turns": noisy(np.full(60, 0.25), 0.02)}
EQUAL = {"analysis/zero_adv_frac": 0.94, "analysis/informative_groups": 1.0}
ENDLESS = {"rollout/tokens/at_cap_frac": noisy(np.full(60, 0.12), 0.01)}
RARE_END = {"rollout/turns/p95": 4.0, "rollout/stop/max_turns": 0.0}
LONELY = {"analysis/lonely_turns": 60.0, "rollout/reward/early_frac": 0.5}
ZEROS = {"analysis/zero_adv_frac": 0.6, "rollout/reward/zero_frac": 0.94}
GROWING = {"rollout/context/mean": noisy(np.linspace(300, 900, 60), 10)}
UNFINISHED = {"val/completion/mean": 0.62, "val/success/pass_k_1": 0.6, "rollout/stop/max_turns": 0.35}
PER_TURN = {"algorithm__advantage_method": "group_based_per_turn"}


def sources(section, key, words, sql, **changes):
    """Return changes of a configuration for a mixture of two sources; None: the source does not set the key."""
    names = {"words": ("gsm8k", words), "sql": ("text_to_sql", sql)}
    own = {
        name: {"environment": {"name": task}, **({section: {key: value}} if value is not None else {})}
        for name, (task, value) in names.items()
    }
    return {"environments": own, **changes}


def turns(words, sql, **changes):
    return sources("generator", "max_turns", words, sql, **changes)


def groups(words, sql, **changes):
    return sources("algorithm", "group_size", words, sql, **changes)


def found(name, run):
    finding = next(rule for rule in RULES if rule.name == name).check(run)
    return finding and Proposals(run.config).settle(finding)


def text_of(finding):
    return " ".join((finding.title, *finding.evidence, *map(str, finding.proposals)))


WORDS, SQL = "environments.words.generator.max_turns=", "environments.sql.generator.max_turns="


@pytest.mark.parametrize(
    ("name", "run", "proposed", "said"),
    [
        ("turn_budget", lambda: of(FLAT, turns(3, 5), **OUT_OF_TURNS), (f"{WORDS}5", f"{SQL}8"), f"{WORDS}3, {SQL}5"),
        (
            "turn_budget",
            lambda: of(FLAT, turns(None, 5), **OUT_OF_TURNS),
            ("generator.max_turns=6", f"{SQL}8"),
            f"generator.max_turns=4, {SQL}5",
        ),
        ("turn_budget", lambda: of(FLAT, turns(None, None), **OUT_OF_TURNS), ("generator.max_turns=6",), "max_turns=4"),
        ("oversized_turns", lambda: of(RISING, turns(12, 20), **RARE_END), (f"{WORDS}6", f"{SQL}6"), "12 or 20 turns"),
        (
            "unfinished_success",
            lambda: of(np.full(60, 0.6), turns(2, 3), **UNFINISHED),
            (f"{WORDS}3", f"{SQL}5"),
            WORDS,
        ),
        ("context_growth", lambda: of(FLAT, turns(8, 20), **GROWING), (f"{WORDS}6", f"{SQL}15"), "tokens"),
    ],
)
def test_turns_of_the_sources(name, run, proposed, said):
    finding = found(name, run())
    assert finding.change.words == proposed and said in text_of(finding)


def test_a_source_with_few_turns_is_not_oversized():
    assert found("oversized_turns", of(RISING, turns(5, 20), **RARE_END)) is None


def test_groups_of_different_sizes():
    finding = found("equal_groups", of(FLAT, groups(4, 6), **EQUAL))
    assert "all 4 or 6 rollouts have" in finding.title and not any("with groups of" in e for e in finding.evidence)
    sizes = [p.words for p in finding.proposals if "group_size" in str(p)]
    assert sizes == [("environments.words.algorithm.group_size=8", "environments.sql.algorithm.group_size=12")]


def test_groups_of_one_size_that_the_sources_set():
    finding = found("equal_groups", of(FLAT, groups(8, 8, algorithm__group_size=2), **EQUAL))
    assert "all 8 rollouts have" in finding.title and any(
        "with groups of 4 and 32 prompts" in e for e in finding.evidence
    )
    half = ("environments.words.algorithm.group_size=4", "environments.sql.algorithm.group_size=4")
    assert finding.change.words == (*half, "trainer.prompts_per_step=32")


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("many_zeros", lambda: of(np.full(60, 0.06), groups(6, 8), **ZEROS)),
        ("lonely_turns", lambda: of(RISING, groups(6, 8, **PER_TURN), **LONELY)),
    ],
)
def test_no_rule_proposes_the_group_size_of_the_run(name, run):
    assert not any("algorithm.group_size" in p.keys for p in found(name, run()).proposals)


def test_tokens_of_the_sources():
    own = {"sampling_params": {"max_generate_length": 64}}
    more = {"sampling_params": {"max_generate_length": 128}}
    changes = {"environments": {"a": {"data": {"path": None}, "generator": own}, "b": {"generator": more}}}
    finding = next(rule for rule in RULES if rule.name == "token_cap").check(of(RISING, changes, **ENDLESS))
    assert finding.title.endswith("reach the cap of 64 or 128 tokens")
    assert [word.rpartition("=")[2] for word in finding.change.words] == ["128", "256"]


def test_a_proposal_that_every_source_replaces_is_left_out():
    def settled(config, word):
        return Proposals(config).settle(Finding(Severity.NOTE, "x", proposals=(Proposal((word,), "why"),))).proposals

    assert settled(configured(**groups(4, 6)), "algorithm.group_size=16") == ()
    assert settled(configured(**groups(None, 6)), "algorithm.group_size=16")
    assert settled(configured(**sources("reward", "scheme", "guide", "skyrl")), "reward.scheme=default") == ()


def test_the_proposed_change_reaches_the_sources(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = of(FLAT, turns(3, 5), **OUT_OF_TURNS)
    change = found("turn_budget", run).change
    cfg = compose([*words_of(run.config, change.words), *change.words])
    read = {name: own.generator.max_turns for name, own in source_configs(OmegaConf.to_object(cfg)).items()}
    assert read == {"words": 5, "sql": 8}


@pytest.mark.parametrize("environments", [None, {}, "x", {"words": None}, {"words": {"generator": "x"}}])
def test_a_mixture_that_cannot_be_read_leaves_the_key_of_the_run(environments):
    assert values_of(of(FLAT, {"environments": environments}), MAX_TURNS) == {MAX_TURNS: 4}
