"""The critic: values at the positions that predict tokens, no shared weights with the policy, and credit."""

import copy
import math
import random
from dataclasses import replace
from types import SimpleNamespace

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
    plain_values,
    samples_of,
)
from helpers import make_group

from mtrl.config.schema import RewardConfig
from mtrl.engines.local.engine import LocalEngine
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.trainer.update.critic import credit_by_critic
from mtrl.trainer.update.value_learner import value_model
from mtrl.types import Group

COMPOSER = RewardComposer(RewardConfig())


@pytest.fixture(scope="module")
def exact_model():
    return make_exact_model()


# values


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_values_are_those_of_a_plain_forward(tiny_model, budget, packing):
    config = config_of(trainer={"max_tokens_per_microbatch": budget, "packing": packing})
    critic, samples = critic_of(tiny_model, config, head=1), samples_of(groups_of(tiny_model.config.vocab_size))
    values = critic.values(samples)
    assert [len(v) for v in values] == [s.action_tokens for s in samples]
    assert all(v.dtype == np.float64 for v in values)
    for sample, own in zip(samples, values, strict=True):
        np.testing.assert_allclose(own, plain_values(critic, sample), atol=2e-5)
    assert np.concatenate(values).std() > 0.1


def test_packing_concatenates_samples(tiny_model):
    critic = critic_of(tiny_model, config_of(trainer={"packing": True}))
    seen = []
    critic.learner.model.body.register_forward_pre_hook(
        lambda *args: seen.append(args[-1]["input_ids"]), with_kwargs=True
    )
    samples = samples_of(groups_of(tiny_model.config.vocab_size))
    critic.values(samples)
    assert [ids.shape for ids in seen] == [(1, sum(len(s.token_ids) for s in samples) - 1)]


def test_a_value_depends_on_all_earlier_tokens_and_not_on_its_own(tiny_model):
    critic = critic_of(tiny_model, head=1)
    (sample, *_) = samples_of(groups_of(tiny_model.config.vocab_size))
    before = critic.values([sample])[0]
    sampled = [place for place, chosen in enumerate(sample.loss_mask) if chosen]
    for place in range(len(sample.token_ids)):
        changed = copy.deepcopy(sample)
        changed.token_ids[place] = (changed.token_ids[place] + 1) % tiny_model.config.vocab_size
        moved = abs(critic.values([changed])[0] - before) > 1e-6
        assert moved.tolist() == [place < token for token in sampled]


def test_the_first_values_are_0_also_without_samples(tiny_model):
    critic = critic_of(tiny_model)
    assert not np.concatenate(critic.values(samples_of(groups_of(tiny_model.config.vocab_size)))).any()
    assert critic.values([]) == [] and critic.update([], [], [], 0) == {}


def test_non_finite_values_are_an_error(tiny_model):
    critic = critic_of(tiny_model)
    with torch.no_grad():
        critic.learner.model.head.bias.fill_(math.inf)
    with pytest.raises(UserError, match="values that are not finite; lower algorithm.critic.optimizer.lr"):
        critic.values(samples_of(groups_of(tiny_model.config.vocab_size)))


# creation


def test_only_methods_that_read_values_get_a_critic(tiny_model):
    assert value_model(config_of("grpo"), tiny_model) is None


@METHODS
def test_critic_and_policy_share_no_weights(make_tiny_model, tiny_tokenizer, method):
    """The engine lets parameters of the policy share storage, and the training of the critic does not affect it."""
    model = make_tiny_model(4)
    LocalEngine(model, tiny_tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    critic = critic_of(model, config_of(method))
    samples = samples_of(groups_of(model.config.vocab_size))
    start = copy.deepcopy(critic.learner.model.state_dict())
    for step in range(2):  # the first step changes only the head, which is 0
        values = critic.values(samples)
        critic.update(samples, values, [v + 1.0 for v in values], step)
    after = critic.learner.model.state_dict()
    assert all(not torch.equal(start[name], after[name]) for name in start)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    places = [p.untyped_storage().data_ptr() for p in (*model.parameters(), *critic.learner.model.parameters())]
    assert len(set(places)) > len(
        list(critic.learner.model.parameters())
    )  # parameters of the policy are fused, so some share storage
    assert not {p.untyped_storage().data_ptr() for p in model.parameters()} & set(
        places[len(list(model.parameters())) :]
    )


def test_a_critic_from_a_folder(make_tiny_model, tiny_tokenizer, tmp_path):
    from mtrl.models.tiny import save

    save(make_tiny_model(7), tiny_tokenizer, tmp_path / "other")
    config = config_of(trainer={"packing": True})
    config.algorithm.critic.path = str(tmp_path / "other")
    policy = make_tiny_model(1)
    critic = critic_of(policy, config)
    expected = make_tiny_model(7).base_model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in critic.learner.model.body.state_dict().items())
    assert not any(p.any() for p in critic.learner.model.head.parameters())


def test_gradient_checkpointing_changes_nothing(make_tiny_model, tiny_tokenizer, tmp_path):
    from mtrl.models.tiny import save

    save(make_tiny_model(7), tiny_tokenizer, tmp_path / "other")
    policy = make_tiny_model(1)
    samples = samples_of(groups_of(policy.config.vocab_size))
    targets = [np.ones(s.action_tokens) for s in samples]
    found = []
    for recomputed in (0, 1, None):
        checkpointing = recomputed != 0
        config = config_of(trainer={"gradient_checkpointing": checkpointing, "recomputed_layers": recomputed or None})
        config.algorithm.critic.path = str(tmp_path / "other")
        critic = critic_of(policy, config, head=2)
        layers = critic.learner.model.body.layers
        marked = [layer.gradient_checkpointing for layer in layers]
        assert sum(marked) == (len(layers) if recomputed is None else recomputed)
        found.append(gradients(critic, samples, critic.values(samples), targets))
    for plain, partly, wholly in zip(*found, strict=True):
        torch.testing.assert_close(plain, partly)
        torch.testing.assert_close(plain, wholly)


def test_unusable_critic_folders_are_errors(make_tiny_model, tiny_tokenizer, tmp_path):
    from mtrl.models.tiny import save

    config = config_of()
    config.algorithm.critic.path = str(tmp_path / "missing")
    with pytest.raises(UserError, match=r"algorithm\.critic\.path=.*missing cannot be loaded .*; give a folder"):
        critic_of(make_tiny_model(), config)
    other = make_tiny_model()
    other.resize_token_embeddings(99)
    save(other, tiny_tokenizer, tmp_path / "small")
    config.algorithm.critic.path = str(tmp_path / "small")
    with pytest.raises(UserError, match="a vocabulary of 99 and the policy one of"):
        critic_of(make_tiny_model(), config)


# credit


def credit(model, groups, config, head=1):
    return credit_by_critic(groups, config.algorithm, critic_of(model, config, head=head), COMPOSER)


def naive_credit(critic, groups, config):
    """Return the advantages and targets of the sampled tokens per trajectory, by plain loops, before whitening."""
    gamma, lam = config.algorithm.gamma, config.algorithm.gae_lambda
    found = {}
    for trajectory in (t for g in groups for t in g.trajectories):
        (sample,) = samples_of([Group(trajectory.group_id, {}, [replace(trajectory, trainable=True)])])
        values = plain_values(critic, sample)
        steps, at = [], 0  # value, reward, tokens
        for turn in trajectory.turns:
            n = len(turn.action_ids)
            if config.algorithm.advantage_method == "gae":
                steps += [(values[at + i], turn.reward if i == n - 1 else 0.0, 1) for i in range(n)]
            else:
                steps.append((values[at], turn.reward, n))
            at += n
        advantage = after = 0.0
        tokens = []
        for value, reward, n in reversed(steps):
            advantage = reward + gamma * after - value + gamma * lam * advantage
            after = value
            tokens += [(advantage, advantage + value)] * n
        found[trajectory.group_id, trajectory.index] = tokens[::-1]
    return found


@METHODS
@pytest.mark.parametrize("whitened", [False, True])
def test_credit_by_a_critic(tiny_model, method, whitened):
    config = config_of(method, gamma=0.9, gae_lambda=0.8, whiten_advantages=whitened)
    groups = groups_of(tiny_model.config.vocab_size)
    groups[1].trajectories[2].trainable = False  # the trajectory counts in the whitening and is not trained
    critic = critic_of(tiny_model, config, head=1)
    credited = credit_by_critic(groups, config.algorithm, critic, COMPOSER)
    expected = naive_credit(critic, groups, config)
    raw = np.array([a for tokens in expected.values() for a, _ in tokens])
    mean, std = (raw.mean(), raw.std(ddof=1)) if whitened else (0.0, 1.0)
    untrained = (groups[1].group_id, 2)
    assert {(s.group_id, s.trajectory) for s in credited.samples} == expected.keys() - {untrained}
    assert len(credited.samples) == len(credited.old_values) == len(credited.targets)
    for sample, old, targets in zip(credited.samples, credited.old_values, credited.targets, strict=True):
        own = expected[sample.group_id, sample.trajectory]
        found = [a for a, sampled in zip(sample.advantages, sample.loss_mask, strict=True) if sampled]
        np.testing.assert_allclose(found, [(a - mean) / std for a, _ in own], atol=5e-5)
        np.testing.assert_allclose(targets, [target for _, target in own], atol=5e-5)
        np.testing.assert_allclose(old, [target - a for a, target in own], atol=5e-5)
        assert all(type(a) is float for a in sample.advantages)
        assert not any(a for a, sampled in zip(sample.advantages, sample.loss_mask, strict=True) if not sampled)
    for group, shown in zip(groups, credited.advantages, strict=True):
        for trajectory, turns in zip(group.trajectories, shown, strict=True):
            tokens = iter((a - mean) / std for a, _ in expected[trajectory.group_id, trajectory.index])
            means = [np.mean([next(tokens) for _ in turn.action_ids]) for turn in trajectory.turns]
            np.testing.assert_allclose(turns, means, atol=5e-5)


@METHODS
def test_credit_does_not_depend_on_breaks(exact_model, method):
    config = config_of(method, gamma=0.9, gae_lambda=0.8)
    whole, cut = (credit(exact_model, groups_of(60, split=split), config) for split in (False, True))
    assert len(cut.samples) > len(whole.samples)
    for of in (
        lambda c: [np.array(s.advantages)[s.loss_mask] for s in c.samples],
        lambda c: c.targets,
        lambda c: c.old_values,
    ):
        a, b = per_trajectory(whole.samples, of(whole)), per_trajectory(cut.samples, of(cut))
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_allclose(a[key], b[key], atol=1e-9)
    for a, b in zip(whole.advantages, cut.advantages, strict=True):
        for turns, others in zip(a, b, strict=True):
            np.testing.assert_allclose(turns, others, atol=1e-9)


@METHODS
def test_conversations_that_interleave_keep_the_order_of_their_turns(method):
    """Turns 0, 2 and 3 are one conversation, and turns 1 and 4 another. The value of a token is an eighth of its id."""
    config = config_of(method, gamma=0.9, gae_lambda=0.8, whiten_advantages=False).algorithm
    parents = (None, None, 0, 2, 1)
    groups = [make_group(seed, 60, size=8, turns=5) for seed in range(2)]
    for trajectory in (t for g in groups for t in g.trajectories):
        del trajectory.turns[len(parents) :]
        for turn, parent in zip(trajectory.turns, parents, strict=False):
            turn.parent, turn.break_reason = parent, "fresh" if parent is None else None
    critic = SimpleNamespace(values=lambda samples: [np.array(s.token_ids)[s.loss_mask] / 8 for s in samples])
    credited = credit_by_critic(groups, config, critic, COMPOSER)
    found = {}
    for sample, old, targets in zip(credited.samples, credited.old_values, credited.targets, strict=True):
        tokens = zip(np.array(sample.turns)[sample.loss_mask], old, targets, strict=True)
        for (turn, *numbers), advantage in zip(tokens, np.array(sample.advantages)[sample.loss_mask], strict=True):
            found.setdefault((sample.group_id, sample.trajectory, int(turn)), []).append((*numbers, advantage))
    for trajectory in (t for g in groups for t in g.trajectories):
        steps = []  # turn, value, reward, tokens
        for index, turn in enumerate(trajectory.turns):
            ids = turn.action_ids if method == "gae" else turn.action_ids[:1]
            rewards = [0.0] * (len(ids) - 1) + [turn.reward]
            count = 1 if method == "gae" else len(turn.action_ids)
            steps += [(index, i / 8, r, count) for i, r in zip(ids, rewards, strict=True)]
        advantage, after, expected = 0.0, 0.0, {}
        for index, value, reward, count in reversed(steps):
            advantage = reward + config.gamma * after - value + config.gamma * config.gae_lambda * advantage
            after = value
            expected.setdefault(index, [])[:0] = [(value, value + advantage, advantage)] * count
        for index, rows in expected.items():
            key = (trajectory.group_id, trajectory.index, index)
            np.testing.assert_allclose(found.pop(key), rows, atol=1e-9)
    assert not found and any(len(t.turns) == len(parents) for g in groups for t in g.trajectories)


@METHODS
def test_turns_without_tokens_count_in_the_metrics_with_their_reward(tiny_model, method):
    group = make_group(1, tiny_model.config.vocab_size, size=2, turns=3)
    trajectory = max(group.trajectories, key=lambda t: len(t.turns))
    silent = trajectory.turns[1]
    silent.action_ids, silent.action_logprobs, silent.version_spans, silent.reward = [], [], [], 0.5
    credited = credit(tiny_model, [group], config_of(method, whiten_advantages=False), head=None)  # all values are 0
    shown = credited.advantages[0][trajectory.index]
    assert len(shown) == len(trajectory.turns) and shown[1] == 0.0
    to_go = [math.fsum(trajectory.rewards[t:]) for t in range(len(shown))]
    assert [a for t, a in enumerate(shown) if t != 1] == pytest.approx([g for t, g in enumerate(to_go) if t != 1])


@METHODS
def test_a_summary_and_the_turn_after_it_are_one_action(exact_model, method):
    config = config_of(method, gamma=0.9, gae_lambda=0.8)
    folded, merged = (make_group(3, 60, size=3, turns=3) for _ in range(2))
    for split, whole in zip(folded.trajectories, merged.trajectories, strict=True):
        turn, joined = split.turns[-1], whole.turns[-1]
        summary = replace(turn, reward=0.0, is_summary=True)
        turn.observation_ids = []
        split.turns.insert(-1, summary)
        for name in ("action_ids", "action_logprobs", "version_spans"):
            setattr(joined, name, 2 * getattr(joined, name))
    found, expected = (credit(exact_model, [group], config) for group in (folded, merged))
    assert [sample.token_ids for sample in found.samples] == [sample.token_ids for sample in expected.samples]
    assert [sample.advantages for sample in found.samples] == [sample.advantages for sample in expected.samples]
    assert [list(targets) for targets in found.targets] == [list(targets) for targets in expected.targets]
    for own, merged_own in zip(found.advantages[0], expected.advantages[0], strict=True):
        assert own == [*merged_own, merged_own[-1]]


@METHODS
def test_no_groups_and_groups_without_tokens(tiny_model, method):
    empty = make_group(0, tiny_model.config.vocab_size, size=2)
    for trajectory in empty.trajectories:
        trajectory.turns = []
    for groups, shown in (([], []), ([empty], [[[], []]])):
        credited = credit(tiny_model, groups, config_of(method))
        assert (credited.samples, credited.old_values, credited.targets) == ([], [], [])
        assert credited.advantages == shown


@METHODS
def test_the_critic_removes_the_luck_of_the_prompt_from_advantages(make_tiny_model, method):
    """One prompt always has a reward and the other never has. Advantages that come only from the prompt vanish."""
    config = config_of(method, lr=3e-3, whiten_advantages=False)
    critic = critic_of(make_tiny_model(3), config)
    groups = groups_of(critic.learner.model.body.config.vocab_size, 6)
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.turns[0].observation_ids[0] = 5 + number % 2
            for turn in trajectory.turns:
                turn.reward = 0.0
            trajectory.turns[-1].reward = float(number % 2)
    sizes = []
    for step in range(40):
        credited = credit_by_critic(groups, config.algorithm, critic, COMPOSER)
        sizes.append(np.mean([abs(a) for s in credited.samples for a in np.array(s.advantages)[s.loss_mask]]))
        critic.update(credited.samples, credited.old_values, credited.targets, step)
    assert sizes[0] == pytest.approx(0.5, abs=0.2) and sizes[-1] < 0.15 * sizes[0]


def test_the_global_random_state_is_not_changed(make_tiny_model):
    """Code that draws from the global random state breaks exact resume."""
    model = make_tiny_model()
    random.seed(0)
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    config = config_of(trainer={"mini_batches": 2})
    critic = critic_of(model, config)
    credited = credit_by_critic(groups_of(model.config.vocab_size), config.algorithm, critic, COMPOSER)
    critic.update(credited.samples, credited.old_values, credited.targets, 0)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
