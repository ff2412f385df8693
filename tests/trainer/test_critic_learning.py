"""Training of the critic: worked numbers, comparison with a plain forward for any batching, and learning."""

import copy
import math
from itertools import chain

import numpy as np
import pytest
import torch
from critics import (
    METHODS,
    config_of,
    critic_of,
    gradients,
    groups_of,
    make_exact_model,
    per_trajectory,
    samples_of,
    zeros,
)

from mtrl.errors import UserError
from mtrl.trainer.update.critic import explained_variance
from mtrl.trainer.update.value_learner import value_losses


@pytest.fixture(scope="module")
def exact_model():
    return make_exact_model()


def learn(critic, samples, targets, steps):
    """Return the loss before the first step and after the last one."""
    losses = []
    for step in range(steps):
        losses.append(critic.update(samples, critic.values(samples), targets, step)["critic/loss"])
    return losses[0], losses[-1]


@METHODS
def test_the_critic_learns_a_constant(make_tiny_model, method):
    critic = critic_of(make_tiny_model(3), config_of(method, lr=1e-2))
    samples = samples_of(groups_of(critic.learner.model.body.config.vocab_size))
    first, last = learn(critic, samples, [np.full(s.action_tokens, 0.75) for s in samples], 40)
    assert first == pytest.approx(0.5 * 0.75**2) and last < 0.02 * first


@METHODS
def test_the_critic_learns_a_function_of_the_state(make_tiny_model, method):
    """The target depends only on the first token, so that no constant fits it."""
    critic = critic_of(make_tiny_model(3), config_of(method, lr=3e-3))
    samples = samples_of(groups_of(critic.learner.model.body.config.vocab_size, 6))
    for index, sample in enumerate(samples):
        sample.token_ids[0] = 5 + index % 2
    targets = [np.full(s.action_tokens, float(index % 2)) for index, s in enumerate(samples)]
    first, last = learn(critic, samples, targets, 40)
    assert last < 0.05 * first
    metrics = critic.update(samples, critic.values(samples), targets, 0)
    assert metrics["critic/explained_variance"] > 0.9
    unseen = copy.deepcopy(samples[0])  # the target depends on the state, not on the sample
    unseen.token_ids[0] = 6
    assert critic.values([unseen])[0][0] > 0.5 > critic.values([samples[0]])[0][0]


def test_clipped_value_losses_worked():
    """With the old value 1 and a clip of .2, a value counts as at most 1.2 or at least .8 towards its target, and
    unclipped away from it."""
    values = torch.tensor([1.1, 1.5, 0.5, 1.5, 0.9, 3.0], requires_grad=True)
    old, targets = torch.ones(6), torch.tensor([2.0, 2.0, 0.0, 0.0, 2.0, 2.5])
    loss, clipped = value_losses(values, old, targets, 0.2)
    expected = [0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 1.1**2, 0.5 * 1.3**2]
    torch.testing.assert_close(loss.detach(), torch.tensor(expected))
    assert clipped.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, 0.0, 1.5, -1.1, 0.0]))
    free, none = value_losses(values.detach(), old, targets, None)
    torch.testing.assert_close(free, 0.5 * (values.detach() - targets).square())
    assert not none.any()


def test_values_beyond_the_clip_have_no_gradient(tiny_model):
    """All values are 0 and were -1, so with a clip of .2 they have moved far enough towards a target of 2."""
    samples = samples_of(groups_of(tiny_model.config.vocab_size))
    old, targets = ([np.full(s.action_tokens, x) for s in samples] for x in (-1.0, 2.0))
    clipped = critic_of(tiny_model, config_of(clip=0.2)).update(samples, old, targets, 0)
    assert clipped["critic/clip_frac"] == pytest.approx(1.0)
    assert clipped["critic/loss"] == pytest.approx(0.5 * (2.0 + 0.8) ** 2) and clipped["critic/grad_norm"] == 0.0
    free = critic_of(tiny_model, config_of(clip=None)).update(samples, old, targets, 0)
    assert free["critic/clip_frac"] == 0.0 and free["critic/grad_norm"] > 0
    assert free["critic/loss"] == pytest.approx(0.5 * 2.0**2)


def expected_gradients(critic, samples, old, targets, clip):
    """Return the gradient of the mean over all trained values, sample by sample through the plain model."""
    losses, per_token = [], critic.config.algorithm.advantage_method == "gae"
    for sample, was, wanted in zip(samples, old, targets, strict=True):
        hidden = critic.learner.model.body(torch.tensor([sample.token_ids])).last_hidden_state[0]
        turn = None
        places = [place for place, sampled in enumerate(sample.loss_mask) if sampled]
        for place, w, target in zip(places, was, wanted, strict=True):
            if per_token or sample.turns[place] != turn:
                value = hidden[place - 1] @ critic.learner.model.head.weight[0] + critic.learner.model.head.bias[0]
                near = min(max(value, w - clip), w + clip)
                losses.append(0.5 * max((value - target) ** 2, (near - target) ** 2))
            turn = sample.turns[place]
    return torch.autograd.grad(sum(losses) / len(losses), list(critic.learner.model.parameters()))


@METHODS
def test_gradients_do_not_depend_on_batching(exact_model, method):
    """The gradients also do not depend on the number of samples of a trajectory."""
    draw = np.random.default_rng(0)
    whole, cut = (samples_of(groups_of(60, split=split)) for split in (False, True))
    assert len(cut) > len(whole)
    drawn = {key: draw.normal(size=(2, len(v))) for key, v in per_trajectory(whole, zeros(whole)).items()}

    def of(samples, place):
        """Split the numbers by sample; they are float32, as the critic's are."""
        taken, out = dict.fromkeys(drawn, 0), []
        for sample in samples:
            key = sample.group_id, sample.trajectory
            end = taken[key] + sample.action_tokens
            out.append(drawn[key][place, taken[key] : end].astype(np.float32).astype(np.float64))
            taken[key] = end
        return out

    reference = critic_of(exact_model, config_of(method, clip=0.5), head=3)
    assert next(reference.learner.model.parameters()).dtype == torch.float64
    expected = expected_gradients(reference, whole, of(whole, 0), of(whole, 1), 0.5)
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 1e-3
    for budget in (1, 64, 10_000):
        for packing in (False, True):
            for samples in (whole, cut):
                trainer = {"max_tokens_per_microbatch": budget, "packing": packing}
                critic = critic_of(exact_model, config_of(method, clip=0.5, trainer=trainer), head=3)
                found = gradients(critic, samples, of(samples, 0), of(samples, 1))
                for a, b in zip(found, expected, strict=True):
                    # the weights of the tokens are float32: 1/n is rounded, the same in every batch
                    torch.testing.assert_close(a, b, atol=1e-7 * scale, rtol=0)


@METHODS
def test_only_sampled_tokens_are_trained_and_with_turn_gae_only_first_tokens(exact_model, method):
    """The test reads the gradient with respect to the values of all positions at the input of the head."""
    samples = samples_of(groups_of(60))
    critic = critic_of(exact_model, config_of(method), head=1)
    seen = []
    full = critic.learner.model.body.forward

    def watched(*args, **kwargs):
        output = full(*args, **kwargs)
        output.last_hidden_state.register_hook(seen.append)
        return output

    critic.learner.model.body.forward = watched
    critic.config.trainer.max_tokens_per_microbatch = 1
    gradients(critic, samples, zeros(samples), [np.full(s.action_tokens, 9.0) for s in samples])
    longest_first = sorted(samples, key=lambda s: -len(s.token_ids))
    for sample, gradient in zip(longest_first, seen, strict=True):
        trained = [bool(row.any()) for row in gradient[0]]
        expected = [
            turn >= 0 and (method == "gae" or turn != before)
            for before, turn in zip(sample.turns, sample.turns[1:], strict=False)
        ]
        assert trained == expected
    assert any(not all(s.loss_mask[s.loss_mask.index(True) :]) for s in samples)  # there are observations between turns


def test_targets_of_later_tokens_of_a_turn_are_not_read(exact_model):
    samples = samples_of(groups_of(60))
    critic = critic_of(exact_model, config_of("turn_gae"), head=1)
    targets = [np.ones(s.action_tokens) for s in samples]
    spoilt = []
    for sample, target in zip(samples, targets, strict=True):
        turns = np.array(sample.turns)[sample.loss_mask]
        spoilt.append(np.where(np.diff(turns, prepend=-1) != 0, target, 1e6))
    assert np.concatenate(spoilt).max() == 1e6
    clean, dirty = (gradients(critic, samples, zeros(samples), t) for t in (targets, spoilt))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_the_mini_batches_are_the_same_as_the_policys(make_tiny_model):
    trainer = {"mini_batches": 2, "update_epochs": 3}
    critic = critic_of(make_tiny_model(), config_of(trainer=trainer))
    samples = samples_of(groups_of(critic.learner.model.body.config.vocab_size, 5))
    steps, update = [], critic.learner.update

    def recorded(parts, step):
        steps.extend(parts)
        return update(parts, step)

    critic.learner.update = recorded
    targets = [np.full(s.action_tokens, float(index)) for index, s in enumerate(samples)]  # distinguishes samples
    critic.update(samples, critic.values(samples), targets, 0)
    weights = [sum(float(batch.weights.sum()) for batch, _, _ in part) for part in steps]
    assert weights == pytest.approx([1.0] * 6), "denominators are those of an optimiser step"
    for epoch in range(3):
        parts = [torch.cat([wanted for _, _, wanted in part]).tolist() for part in steps[2 * epoch : 2 * epoch + 2]]
        assert sorted(chain(*parts)) == sorted(chain(*(t.tolist() for t in targets)))
        groups = [{samples[int(index)].group_id for index in part} for part in parts]
        assert not groups[0] & groups[1]
    assert critic.update([], [], [], 1) == {}


def test_metrics(make_tiny_model):
    config = config_of(lr=2e-3)
    config.algorithm.critic.optimizer.warmup_steps = 4
    critic = critic_of(make_tiny_model(), config)
    samples = samples_of(groups_of(critic.learner.model.body.config.vocab_size))
    draw = np.random.default_rng(0)
    old, targets = ([draw.normal(size=s.action_tokens) for s in samples] for _ in range(2))
    metrics = critic.update(samples, old, targets, 1)
    names = ("loss", "value_mean", "explained_variance", "grad_norm", "clip_frac", "lr")
    assert set(metrics) == {f"critic/{name}" for name in names}
    flat_old, flat = np.concatenate(old), np.concatenate(targets)
    assert metrics["critic/lr"] == pytest.approx(1e-3)
    assert metrics["critic/value_mean"] == pytest.approx(flat_old.mean())
    assert metrics["critic/loss"] == pytest.approx(0.5 * np.square(flat).mean(), rel=1e-5)  # all values are 0
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (flat - flat_old).var() / flat.var())


def test_explained_variance():
    targets = np.array([0.0, 1.0, 2.0, 5.0])
    of = lambda values, targets=targets: explained_variance(values, targets).get("critic/explained_variance")  # noqa: E731
    assert of(targets + 3.0) == pytest.approx(1.0)
    assert of(np.full(4, 7.0)) == pytest.approx(0.0)
    assert of(2 * targets.mean() - targets) == pytest.approx(-3.0)
    assert of(targets, (np.array([0.3, 0.1, 0.2, 0.1]) - 1.0) + 1.0 - np.array([0.3, 0.1, 0.2, 0.1])) is None


def test_a_non_finite_loss_raises_and_writes_the_batch(make_tiny_model, tmp_path):
    critic = critic_of(make_tiny_model(), dump=tmp_path / "dump.jsonl")
    samples = samples_of(groups_of(critic.learner.model.body.config.vocab_size))
    weights = copy.deepcopy(critic.learner.model.state_dict())
    targets = zeros(samples)
    targets[0][0] = math.nan
    with pytest.raises(UserError, match=r"the critic's loss is nan at step 5; the batch is in .*dump\.jsonl"):
        critic.update(samples, zeros(samples), targets, 4)
    assert len((tmp_path / "dump.jsonl").read_text().splitlines()) == len(samples)
    assert all(torch.equal(weights[name], value) for name, value in critic.learner.model.state_dict().items())
