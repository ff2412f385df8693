"""GSM8K: word problems over several turns, with feedback and an optional calculator."""

from envs.gsm8k.data import decoys, gold, load, worked_example
from envs.gsm8k.demonstrator import demonstrate
from envs.gsm8k.environment import Gsm8kEnv
from envs.gsm8k.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="gsm8k",
    environment=Gsm8kEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=("calculator", "operations"),
    tokens=("<calc>", "</calc>", "####"),
)
