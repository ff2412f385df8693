"""Service: talk with a simulated customer, follow a procedure, and leave the orders of a shop in the right state."""

from envs.service.data import decoys, gold, load, worked_example
from envs.service.demonstrator import demonstrate
from envs.service.environment import ServiceEnv, offline
from envs.service.pieces import tokens
from envs.service.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="service",
    environment=ServiceEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    offline=offline,
    config_keys=("customer", "endpoint"),
    tokens=tokens(),
)
