"""Standard operating procedures: call the tools in the order of the procedure, decide by its rules, and report the
result."""

from envs.sop.data import decoys, gold, load, worked_example
from envs.sop.demonstrator import demonstrate
from envs.sop.domains import tokens
from envs.sop.environment import SopEnv
from envs.sop.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="sop",
    environment=SopEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=("domain", "format_coef", "tools_spec", "sop_bench"),
    tokens=tokens(),
)
