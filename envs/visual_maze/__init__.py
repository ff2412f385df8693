"""Visual maze: walk through a maze that is shown in a picture after every step."""

from envs.visual_maze.data import decoys, gold, load
from envs.visual_maze.demonstrator import demonstrate
from envs.visual_maze.environment import VisualMazeEnv
from envs.visual_maze.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="visual_maze",
    environment=VisualMazeEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    measure=measure,
    config_keys=("size", "steps", "cell"),
    tokens=("<move>", "</move>"),
    shows_images=True,
)
