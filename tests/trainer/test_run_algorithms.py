"""Whole runs with each algorithm: they train, and they resume exactly; test_run.py kills runs."""

import pytest
from runs import NO_EVALUATION, finish, rows_of, start, weights_of

pytestmark = pytest.mark.slow

SHORT = [*NO_EVALUATION, "trainer.prompts_per_step=2"]


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=group_based_per_turn", "algorithm.kl_loss_coef=0.01", "algorithm.kl_target=0.001"],
        ["algorithm=mt_grpo", "algorithm.loss_fn=cispo"],
        ["algorithm=gigpo", "algorithm.loss_fn=importance_sampling"],
        ["algorithm=grpo_passk", "algorithm.loss_fn=sapo", "trainer.packing=true"],
        ["algorithm=gspo", "algorithm.off_policy_correction=mis", "trainer.mini_batches=2"],
        ["algorithm=decoupled_ppo", "algorithm.advantage_method=reinforce_pp", "trainer.update_epochs=2"],
        ["algorithm=dppo", "algorithm.credit=turn+outcome", "algorithm.entropy_coef=0.001"],
    ],
    ids=lambda words: words[0],
)
def test_algorithms_train(tmp_path, words):
    run_dir = tmp_path / "run"
    finish(start(run_dir, *words, *SHORT, "trainer.max_steps=2"))
    last = rows_of(run_dir)[-1]
    assert last["step"] == 2 and last["train/grad_norm"] > 0
    assert last["analysis/logprob_drift/max"] < 1e-4


def assert_exact(folder, *words):
    """Assert that a run of four steps equals the one that continues after its second, and return its folder."""
    whole, half = folder / "whole", folder / "half"
    finish(start(whole, *words, "trainer.max_steps=4"))
    finish(start(half, *words, "trainer.max_steps=4", f"resume={whole}/checkpoints/step_000002"))
    assert rows_of(half) == rows_of(whole)[-2:]
    assert weights_of(half) == weights_of(whole)
    return whole


@pytest.mark.parametrize(
    "words",
    [
        [
            "algorithm.kl_reward_coef=0.05",
            "algorithm.kl_target=0.0001",
            "algorithm.kl_horizon=100",
            "algorithm.dynamic_sampling_rounds=20",
            "algorithm.overlong_filtering=true",
        ],
        ["algorithm=turn_gae", "trainer.mini_batches=2"],
        [
            "algorithm=gae",
            "algorithm.critic.warmup_steps=1",
            "data.sampler=difficulty",
            "data.sampler_config={band: [0.1, 0.6]}",
            "data.max_train_rows=8",
        ],
    ],
    ids=lambda words: words[0],
)
def test_a_resumed_run_is_exact(tmp_path, words):
    """Every state is resumed: the coefficient, the critic, the drawn rows, and the results of the rows."""
    for row in rows_of(assert_exact(tmp_path, *words, *SHORT)):
        task = row["rollout/components/correct"] + row["rollout/components/format"]
        assert row["rollout/reward/mean"] == pytest.approx(task), "without the penalty"
