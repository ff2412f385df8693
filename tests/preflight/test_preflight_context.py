"""What every check is given."""

from omegaconf import OmegaConf

from mtrl.config.compose import compose
from mtrl.environments.factory import environment_factory
from mtrl.errors import UserError
from mtrl.preflight import checklist
from mtrl.preflight.context import Context
from mtrl.preflight.result import Status
from tests.preflight.broken.sound import Lookup, demonstrate, family, gold


def context_of(family):
    overrides = ["experiment=null", "environment.name=x", "environment.target=tests.preflight.broken.sound.FAMILY"]
    config = OmegaConf.to_object(compose(overrides))
    splits = family.load(config.data, config.seed)
    return Context(config, family, splits, environment_factory(config, family), rows_played=16, seconds=20.0)


def test_rows_that_the_familys_players_refuse_are_left_out():
    """Generated rows have players, loaded ones perhaps not; that is no fault of the environment."""

    def refusing(player):
        def play(row, *more):
            if int(row["ground_truth"]["answer"]) % 2:
                raise UserError("this row is unknown")
            return player(row, *more)

        return play

    known = family(Lookup, gold=refusing(gold), demonstrate=refusing(demonstrate))
    context = context_of(known)
    assert 0 < len(context.gold) < len(context.rows) and not any(episode.error for episode in context.gold)
    assert context.weak and not any(episode.error for episode in context.weak)
    assert checklist.CHECKS["gold"](context).status == Status.PASS
    assert checklist.CHECKS["robust"](context).status == Status.PASS

    def nobody(row, *more):
        raise UserError("no row is known")

    context = context_of(family(Lookup, gold=nobody, demonstrate=nobody))
    assert "knows no right answer to these rows" in checklist.CHECKS["gold"](context).evidence
    assert "knows none of these rows" in checklist.CHECKS["spread"](context).evidence
