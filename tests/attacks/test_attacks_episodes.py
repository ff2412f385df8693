"""A batch of hostile policies in one episode loop; and the number of all attacks."""

import asyncio
from dataclasses import replace
from functools import partial

import gsm8k_attacks
import pytest
import shell_attacks
import sql_attacks
import tool_attacks
from attack_kit import distinct
from test_attacks_sql import TRUTH as SQL_TRUTH
from test_attacks_tools import Shop

from envs.gsm8k import FAMILY as GSM8K
from envs.text_to_sql import FAMILY as TEXT_TO_SQL
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.conversation import Conversation, SingleMessageConversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import StopReason, to_json

LONGEST = 2_000
"""Maximum length of an attack in characters; the tests of each family use the longer ones."""
BATCH = 120
MAKERS = {
    "sql": partial(TEXT_TO_SQL.environment, max_turns=3, query_operations=100_000),
    "gsm8k": partial(GSM8K.environment, max_turns=3, calculator=True),
    "tools": Shop,
}
ATTACKS = {
    "sql": [f"<sql>{each.text}</sql>" for each in sql_attacks.queries()] + [e.text for e in sql_attacks.responses()],
    "gsm8k": [each.text for each in gsm8k_attacks.turns()],
    "tools": [each.text for each in tool_attacks.turns() if each.family != "slow"],
}
RIGHT = {"sql": f"<solution>{SQL_TRUTH['sql']}</solution>", "gsm8k": "#### 72", "tools": "500"}
TRUTHS = {"sql": SQL_TRUTH, "gsm8k": {"answer": "72"}, "tools": {}}


def make_row(task):
    prompt = [{"role": "user", "content": "question"}]
    return {"id": task, "prompt": prompt, "ground_truth": TRUTHS[task], "style": "short"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Conversation, SingleMessageConversation])
def test_a_batch_of_hostile_policies_ends_without_errors(layout, tiny_tokenizer, tiny_codec, outside):
    """Episodes of two hostile turns and a right one end without an error, and the last turn is rewarded."""
    responses = {
        f"{task}-{number}/0": [text, attacks[-1 - number % len(attacks)], RIGHT[task]]
        for task, attacks in (
            (task, [outside.fill(text).encode(errors="replace").decode() for text in texts if len(text) < LONGEST])
            for task, texts in ATTACKS.items()
        )
        for number, text in enumerate(attacks[:: max(1, len(attacks) // BATCH)])
    }
    pool = EnvironmentPool(16)
    sampling = SamplingParams(max_generate_length=5_000, stop_token_ids=tiny_codec.stop_token_ids)
    engine = ScriptedEngine(responses, tiny_tokenizer)
    limits = EpisodeLimits(max_turns=3, max_context_length=10**6, step_timeout=120, episode_timeout=600, retries=0)
    loops = {
        task: EpisodeLoop(engine, maker, partial(layout, tiny_codec), pool, limits) for task, maker in MAKERS.items()
    }

    async def run():
        names = [name.removesuffix("/0") for name in responses]
        rows = [name.split("-")[0] for name in names]
        return await asyncio.gather(
            *(
                loops[task].run(make_row(task), name, 0, replace(sampling))
                for task, name in zip(rows, names, strict=True)
            )
        )

    trajectories = asyncio.run(run())
    pool.close()
    assert len(trajectories) == len(responses) > 2 * BATCH
    for trajectory in trajectories:
        assert trajectory.error is None and trajectory.stop_reason == StopReason.DONE, trajectory.error
        assert sum(trajectory.rewards[:2]) <= 0.2, trajectory.turns[0].text[:100]
        solved = len(trajectory.turns) == 3 or "<solution>" not in trajectory.turns[-1].text
        assert trajectory.reward > 0.5 if solved else trajectory.reward <= 0.0, trajectory.turns[0].text[:100]
        (sample,) = trajectory_samples(trajectory, [1.0] * len(trajectory.turns))
        trained = [i for i, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
        assert trained == [i for turn in trajectory.turns for i in turn.action_ids]
        to_json(trajectory).encode()
    outside.check()


def test_there_are_enough_attacks():
    sql = [*sql_attacks.queries(), *sql_attacks.responses(), *sql_attacks.nested_bombs()]
    sql += sql_attacks.swelling_aggregates()
    shell = [*shell_attacks.quick(), *shell_attacks.greedy()]
    counts = {
        "sql": distinct(sql),
        "shell": distinct(shell),
        "tools": distinct(tool_attacks.turns()),
        "gsm8k": distinct(gsm8k_attacks.turns()),
    }
    print(counts)
    assert min(counts.values()) >= 100 and sum(counts.values()) >= 500
    again = {attack.text for attack in sql_attacks.queries()}
    assert again == {attack.text for attack in sql_attacks.queries()}, "drawn by a fixed seed"
