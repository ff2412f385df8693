"""Games: break a code by its marks, or find the way through a maze that is visible one step at a time."""

from envs.games.data import decoys, gold, load, worked_example
from envs.games.demonstrator import demonstrate
from envs.games.environment import GamesEnv
from envs.games.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="games",
    environment=GamesEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=("game", "places", "symbols", "size", "steps"),
    tokens=("<move>", "</move>"),
)
