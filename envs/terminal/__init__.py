"""Tasks in containers: folders of Harbor and Terminal-Bench, one tool `bash`, and the tests of each task."""

from envs.terminal.data import gold, load
from envs.terminal.environment import TerminalEnv
from envs.terminal.scorer import answered, explain, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="terminal",
    environment=TerminalEnv,
    load=load,
    score=score,
    gold=gold,
    answered=answered,
    explain=explain,
    measure=measure,
    waits_for_processes=True,
    config_keys=(
        "backend",
        "command_seconds",
        "output_characters",
        "memory_mb",
        "cpus",
        "processes",
        "disk_mb",
        "network",
        "servers",
        "warm_containers",
    ),
)
