"""TriviaQA with Wikipedia search: the task of MT-GRPO, with turn rewards and outcome rewards."""

from envs.triviaqa.data import load, worked_example
from envs.triviaqa.demonstrator import CALL, END_CALL, decoys, demonstrate, gold
from envs.triviaqa.environment import TriviaQaEnv
from envs.triviaqa.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="triviaqa",
    environment=TriviaQaEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=("tools_file", "reward_file", "retriever", "corpus", "url", "observation_characters"),
    tokens=(
        "<reasoning>",
        "</reasoning>",
        "<tool>",
        "</tool>",
        "<answer>",
        "</answer>",
        "<result>",
        "</result>",
        CALL,
        END_CALL,
    ),
)
