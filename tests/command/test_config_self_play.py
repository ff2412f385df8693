"""Settings of self-play: what cannot be played is refused in one sentence, and a setting without effect warns."""

import pytest

from envs.tic_tac_toe.environment import TicTacToeEnv
from mtrl.command.checks import check
from mtrl.command.compose import compose
from mtrl.errors import UserError

GAME = "experiment=tic_tac_toe"
REFUSED = [
    ([GAME, "environment.opponent=itself"], "environment.opponent=itself"),
    (["environment.opponent=policy"], "environment.opponent=policy needs a task with several roles, and gsm8k has one"),
    (
        [GAME, "environment.opponent=frozen", "generator.backend=vllm", "generator.vllm.urls=[http://127.0.0.1:8000]"],
        "which generator.backend=vllm does not have; set generator.backend=local, or environment.opponent=policy",
    ),
    (
        [GAME, "generator.agent.target=tests.agents.agent_functions.answer"],
        "environment.opponent=policy needs the episode loop of mtrl, and generator.agent names a program",
    ),
    (
        [GAME, "environments={a: {environment: {name: gsm8k}}}"],
        "environment.opponent=policy works with one task only, and environments has a",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_be_played_is_refused(overrides, said, monkeypatch):
    monkeypatch.setattr("mtrl.command.agent_checks.load_function", lambda *_: lambda row, client: None)
    with pytest.raises(UserError) as refused:
        check(compose(overrides))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "why"), [("turns", "it is a word of other metrics"), ("side x", "it must be letters, digits and _")]
)
def test_the_name_of_a_role_fits_the_names_of_metrics(name, why, monkeypatch):
    monkeypatch.setattr(TicTacToeEnv, "roles", ("x", name))
    with pytest.raises(UserError, match=f"{name!r} in TicTacToeEnv.roles cannot be the name of a role, since {why}"):
        check(compose([GAME]))


def test_a_path_without_a_frozen_opponent_warns():
    (warning,) = check(compose([GAME, "environment.opponent_path=x"]))
    assert warning.startswith("environment.opponent_path=x has no effect with another environment.opponent than frozen")
    assert check(compose([GAME, "environment.opponent=frozen", "environment.opponent_path=x"])) == []
