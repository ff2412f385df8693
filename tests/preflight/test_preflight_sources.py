"""`mtrl preflight` on a mixture: each source is checked as the task that it is, with the policy of the mixture."""

from omegaconf import OmegaConf

from mtrl.command.compose import compose
from mtrl.config.mixture import source_configs
from mtrl.environments.factory import load_task
from mtrl.preflight import __main__ as program
from mtrl.preflight.checklist import CHECKS
from mtrl.preflight.policy_checks import CHECKS as POLICY_CHECKS
from mtrl.preflight.result import Status
from mtrl.preflight.sources import tasks_of, with_settings

WORDS = ["experiment=mixture", "debug=fast", "preflight.rows=2", "preflight.rollouts=4"]
OWN = ["environments.words.weight=3", "environments.sql.algorithm.group_size=3", "trainer.prompts_per_step=4"]
IDLE = "+environments.idle={weight: 0, environment: {name: gsm8k}}"


def config_of(*words):
    return OmegaConf.to_object(compose([*WORDS, *OWN, *words]))


def test_all_checks_run_for_each_source(monkeypatch):
    chosen = {name: CHECKS[name] for name in ("gold", "batch")}
    monkeypatch.setattr(program, "CHECKS", chosen)
    results = list(program.check(config_of(IDLE)))
    sources, policy = ("words", "sql", "idle"), [name for name, _ in POLICY_CHECKS]
    expected = [f"{source}: {name}" for names in (chosen, policy) for source in sources for name in names]
    assert [result.name for result in results] == expected
    found = {result.name: result for result in results}
    assert {found[f"{source}: gold"].status for source in sources} == {Status.PASS}
    assert found["words: batch"].evidence.startswith("3 prompts x 2 = 6 episodes per step")
    assert found["sql: batch"].evidence.startswith("1 prompts x 3 = 3 episodes per step")
    assert found["words: failures"].evidence.startswith("4 episodes, ")
    assert found["sql: failures"].evidence.startswith("6 episodes, "), "two groups of three"
    assert {found[f"idle: {name}"].evidence for name in policy} == {
        "the source has no training rows, since its weight is 0"
    }


def test_a_policy_that_cannot_be_made_is_one_failure(monkeypatch):
    monkeypatch.setattr(program, "CHECKS", {"batch": CHECKS["batch"]})
    monkeypatch.setattr("mtrl.trainer.setup.parts.set_up", lambda *words: 1 / 0)
    results = list(program.check(config_of()))
    assert [(result.name, result.status) for result in results[2:]] == [
        ("foothold", Status.FAIL),
        *((name, Status.SKIP) for name, _ in POLICY_CHECKS[1:]),
    ]
    assert results[2].evidence == "the policy could not run episodes: ZeroDivisionError: division by zero"


def test_without_a_mixture_the_run_itself_is_checked():
    config = OmegaConf.to_object(compose(["debug=fast"]))
    task = load_task(config)
    assert tasks_of(config, task) == {"": (config, task)}


def test_settings_of_a_source_replace_its_own():
    config = config_of("environments.words.environment.config={calculator: true}")
    changed = with_settings(config, {"words": {"calculator": False}})
    before, after = source_configs(config), source_configs(changed)
    assert before["words"].environment.config == {"calculator": True}
    assert after["words"].environment.config == {"calculator": False} and after["words"].environment.name == "gsm8k"
    assert after["sql"] == before["sql"] and changed.environments["words"]["weight"] == 3
