"""Mini-SWE: repair a small repository with shell commands until its hidden tests pass."""

from envs.mini_swe.data import load, worked_example
from envs.mini_swe.demonstrator import decoys, demonstrate, gold
from envs.mini_swe.environment import MiniSweEnv
from envs.mini_swe.prompts import SUBMIT
from envs.mini_swe.scorer import answered, explain, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="mini_swe",
    environment=MiniSweEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    explain=explain,
    measure=measure,
    waits_for_processes=True,
    config_keys=(
        "backend",
        "command_seconds",
        "grading_seconds",
        "observation_characters",
        "container_memory",
        "container_processes",
        "container_disk_mb",
        "functions",
    ),
    tokens=("```bash\n", "\n```", "cat f.py", "sed -i 's|", "|' f.py", f" && echo {SUBMIT}"),
)
