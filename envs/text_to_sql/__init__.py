"""Text-to-SQL: explore a database with queries, then submit the query that answers the question."""

from envs.text_to_sql.data import load, worked_example
from envs.text_to_sql.demonstrator import decoys, demonstrate, gold
from envs.text_to_sql.environment import TextToSqlEnv
from envs.text_to_sql.scorer import answered, measure, score
from mtrl.environments.family import Family

FAMILY = Family(
    name="text_to_sql",
    environment=TextToSqlEnv,
    load=load,
    score=score,
    demonstrate=demonstrate,
    gold=gold,
    decoys=decoys,
    answered=answered,
    worked_example=worked_example,
    measure=measure,
    config_keys=(
        "db_path",
        "query_operations",
        "query_seconds",
        "observation_rows",
        "observation_characters",
    ),
    tokens=("<sql>", "</sql>", "<solution>", "</solution>", "<observation>", "</observation>"),
)
