"""Whole runs with each algorithm: they train, and they resume exactly after a kill."""

import signal

import pytest
from runs import finish, rows_of, start, weights_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=rloo", "algorithm.kl_loss_coef=0.01"],
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
    finish(start(run_dir, *words, "trainer.max_steps=3"))
    last = rows_of(run_dir)[-1]
    assert last["step"] == 3 and last["train/grad_norm"] > 0
    assert last["analysis/logprob_drift/max"] < 1e-4


KILL_AFTER_THREE = """
    import os, signal
    from mtrl.scoring.heldout import HeldOut
    evaluate = HeldOut.run
    async def evaluate_or_die(self, step, on_episode):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return await evaluate(self, step, on_episode)
    HeldOut.run = evaluate_or_die
"""
"""Code that ends the process after the third step; the last checkpoint is that of the second."""


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.kl_reward_coef=0.05", "algorithm.kl_target=0.0001", "algorithm.kl_horizon=100"],
        ["algorithm=turn_gae", "trainer.mini_batches=2"],
        ["algorithm=gae", "algorithm.critic.warmup_steps=1"],
        ["algorithm.dynamic_sampling_rounds=20", "algorithm.overlong_filtering=true"],
        ["data.sampler=difficulty", "data.sampler_config={band: [0.1, 0.6]}", "data.max_train_rows=8"],
    ],
    ids=lambda words: words[0],
)
def test_a_killed_run_resumes_exactly(tmp_path, words):
    """Every state is resumed: the coefficient, the critic, the drawn rows, and the results of the rows."""
    words = [*words, "trainer.max_steps=4"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(whole, *words))
    finish(start(cut, *words, code=KILL_AFTER_THREE), expected=-signal.SIGKILL)
    finish(start(cut, *words, "resume=latest"))
    assert rows_of(cut) == rows_of(whole)
    assert weights_of(cut) == weights_of(whole)
