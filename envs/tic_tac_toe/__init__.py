"""Tic-tac-toe: two roles on one board, for self-play or against a fixed opponent."""

from envs.tic_tac_toe.data import decoys, gold, load, worked_example
from envs.tic_tac_toe.demonstrator import demonstrate
from envs.tic_tac_toe.environment import TicTacToeEnv
from envs.tic_tac_toe.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="tic_tac_toe",
    environment=TicTacToeEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    tokens=("<move>", "</move>"),
)
