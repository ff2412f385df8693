"""A run whose length is a number of passes over its training rows."""

import pytest

from mtrl.command.compose import compose
from mtrl.config.epochs import length_of, with_steps
from mtrl.config.schema import Config
from mtrl.errors import UserError


def made(epochs, per_step=8, warmup=0):
    config = Config()
    config.trainer.epochs, config.trainer.prompts_per_step = epochs, per_step
    config.algorithm.critic.warmup_steps = warmup
    return config


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 64, 8), (2, 64, 16), (0.5, 64, 4), (2, 7, 2), (1, 9, 2), (0.001, 64, 1)]
)
def test_it_is_the_fewest_steps_that_draw_each_row_so_often(epochs, rows, steps):
    trainer = with_steps(made(epochs), rows, False).trainer
    assert (trainer.max_steps, trainer.epochs) == (steps, None)
    assert steps * 8 >= epochs * rows and (steps == 1 or (steps - 1) * 8 < epochs * rows)


def test_a_rounding_error_adds_no_step():
    """1.1 * 100 is 110.00000000000001 in floats."""
    assert with_steps(made(1.1, per_step=10), 100, False).trainer.max_steps == 11


def test_without_epochs_the_steps_stay():
    config = made(None)
    assert with_steps(config, 64, True) is config


def test_a_critic_that_warms_up_for_the_whole_run_is_refused():
    with pytest.raises(
        UserError, match=r"warmup_steps=16 leaves no step for the policy of trainer.epochs=2, which is 16"
    ):
        with_steps(made(2, warmup=16), 64, True)
    assert with_steps(made(2, warmup=15), 64, True).trainer.max_steps == 16


def test_the_warm_up_of_a_critic_that_a_run_does_not_have_is_not_refused():
    assert with_steps(made(2, warmup=16), 64, False).trainer.max_steps == 16


def test_two_lengths_in_one_command_are_refused():
    with pytest.raises(UserError, match=r"trainer.epochs=2 and trainer.max_steps=50 both set the length of the run"):
        compose(["trainer.epochs=2", "trainer.max_steps=50"])
    assert length_of(["++trainer.epochs=null", "trainer.max_steps=50"], True) == []
    assert compose(["trainer.epochs=2", "experiment=gsm8k"]).trainer.epochs == 2, "whatever the experiment says"


def test_no_pass_is_refused():
    with pytest.raises(UserError, match=r"trainer.epochs=0.0 must be above 0"):
        compose(["trainer.epochs=0"])


@pytest.mark.parametrize(
    ("typed", "length"),
    [
        ([], (100, 2)),
        (["trainer.max_steps=5"], (5, None)),
        (["debug=fast"], (2, None)),
        (["debug=fast", "trainer.epochs=3"], (2, 3)),
        (["trainer.max_steps=5", "trainer.epochs=null"], (5, None)),
    ],
)
def test_steps_of_the_command_win_over_passes_of_an_experiment(tmp_path, typed, length):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "m.yaml").write_text("# @package _global_\ntrainer: {epochs: 2, max_steps: 100}\n")
    for where in ([], ["hydra.searchpath=[" + f"'file://{tmp_path}']"]):
        cfg = compose(["experiment=m", *where, *typed], None if where else str(tmp_path))
        assert (cfg.trainer.max_steps, cfg.trainer.epochs) == length
