"""Search: find facts with queries over several turns, then answer."""

from envs.search.data import load, worked_example
from envs.search.demonstrator import decoys, demonstrate, gold
from envs.search.environment import SearchEnv
from envs.search.retrievers import OPTIONS
from envs.search.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="search",
    environment=SearchEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=("retriever", "url", "corpus", "topk", "observation_characters", *OPTIONS),
    tokens=("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"),
)
