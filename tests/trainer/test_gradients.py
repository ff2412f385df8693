"""The gradient of an optimiser step does not depend on the batching of its tokens (invariant 2).

The reference is the formula: each trajectory alone through the plain model, all tokens of the step in one `TokenBatch`.
Every loss, correction and reduction is compared with it: with few or many samples per micro-batch, padded or packed,
trajectories merged or one sample per turn, samples without advantage computed or left out, one process or two. The
engine sampled with older weights and rounds its log-probs, so that ratios are clipped on both sides and corrections
mask some tokens; `test_the_data_exceeds_every_bound` checks this.
"""

import copy
import random
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from alone import updater_of
from helpers import make_group, split_by_turn
from transformers import GPT2Config, GPT2LMHeadModel

from mtrl.algorithms.losses import TokenBatch, weighted_sum
from mtrl.algorithms.reductions import Totals, token_weights
from mtrl.algorithms.registry import CORRECTIONS, LOSSES, REDUCTIONS, find_correction, find_loss
from mtrl.config.algorithm_schema import AlgorithmConfig, DppoConfig
from mtrl.config.schema import Config
from mtrl.trainer.data.batching import PACKED, PADDED, micro_batches
from mtrl.trainer.data.samples import Credited, group_samples
from mtrl.trainer.update.distillation import Distillation, LocalTeacher
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.types import Group
from tests.distributed.ranks import run_ranks

RANKS = 2
EXACT = 1e-10
"""Tolerance relative to the largest component of the gradient, in float64."""
LOW, HIGH = 0.9, 1.1
"""Bounds on the ratio that the data of these tests exceeds on both sides."""


def entries(registry):
    return list({registry.find(name).name: registry.find(name) for name in registry.names()}.values())


@dataclass(frozen=True)
class Case:
    loss: str = "ppo"
    correction: str = "none"
    reduction: str = "token_mean"
    anchor: str = "rollout"

    def __str__(self):
        return "-".join((self.loss, self.correction, self.reduction, self.anchor))

    @property
    def algorithm(self):
        """Return an algorithm with bounds that some tokens exceed and others do not."""
        return AlgorithmConfig(
            loss_fn=self.loss,
            off_policy_correction=self.correction,
            loss_reduction=self.reduction,
            loss_anchor=self.anchor,
            clip_low_threshold=LOW,
            clip_high_threshold=HIGH,
            is_cap=HIGH,
            dual_clip=1.3,
            dppo=DppoConfig(delta_low=0.001, delta_high=0.001),
            correction_low=0.8,
            correction_high=1.25,
            max_sequence_length=32,
        )

    @property
    def per_trajectory(self):
        return find_loss(self.loss).per_trajectory or find_correction(self.correction).per_trajectory


ANCHORS = ("rollout", "old")
CASES = list(
    dict.fromkeys(
        [
            *(Case(loss=e.name, anchor=anchor) for e in entries(LOSSES) for anchor in ANCHORS),
            *(Case(correction=e.name, anchor=anchor) for e in entries(CORRECTIONS) for anchor in ANCHORS),
            *(Case(reduction=e.name) for e in entries(REDUCTIONS)),
            *(  # losses and corrections per trajectory, combined with a reduction that counts trajectories
                Case(loss=loss.name, correction=correction.name, reduction="sequence_mean", anchor="old")
                for loss in entries(LOSSES)
                for correction in entries(CORRECTIONS)
                if loss.per_trajectory and correction.per_trajectory
            ),
        ]
    )
)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass(frozen=True)
class Way:
    """A batching of the tokens of a step."""

    budget: int = 10_000
    packing: bool = False
    drop: bool = True
    split: bool = False
    """One sample per turn."""


FEW_WAYS = ("one sample each", "packed, some", "a sample per turn, packed, idle computed")
"""The ways that losses and corrections of single tokens get with the mean over tokens: they run the same code in the
other ways. The default algorithm and all other cases get every way."""
WAYS = {
    "all at once": Way(),
    "one sample each": Way(budget=1),
    "some samples each": Way(budget=64),
    "packed, some": Way(packing=True, budget=64),
    "idle computed": Way(drop=False),
    "a sample per turn, one each": Way(split=True, budget=1),
    "a sample per turn, packed, some": Way(split=True, packing=True, budget=64),
    "a sample per turn, packed, idle computed": Way(split=True, packing=True, drop=False),
}


@dataclass(eq=False)
class Step:
    """The data of an optimiser step: trajectories, an advantage per turn, and weights older than the model's."""

    model: torch.nn.Module
    old: torch.nn.Module
    groups: list[Group]
    advantages: list[list[list[float]]]

    @classmethod
    def make(cls, model):
        old = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in old.parameters():
                p += 0.02 * p.std() * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        groups = [make_group(seed, model.config.vocab_size) for seed in range(4)]
        rng = random.Random(5)
        advantages = [
            [[rng.choice([-1.5, -0.5, 0, 0.5, 1.5]) for _ in t.turns] for t in g.trajectories] for g in groups
        ]
        advantages[1] = [[0.0] * len(turns) for turns in advantages[1]]  # a group without a signal
        for index, trajectory in enumerate(t for group in groups for t in group.trajectories):
            noise = (0.001, 0.02, 0.5)[index % 3]
            logprobs = iter(plain_logprobs(old, *flat(trajectory)).tolist())
            for turn in trajectory.turns:
                turn.action_logprobs = [next(logprobs) + rng.gauss(0, noise) for _ in turn.action_ids]
        return cls(model, old, groups, advantages)

    def divided(self, split):
        """Return the groups, or the same with one sample per turn."""
        if not split:
            return self.groups
        return [Group(g.group_id, g.row, [split_by_turn(t) for t in g.trajectories]) for g in self.groups]

    def samples(self, split=False):
        pairs = zip(self.divided(split), self.advantages, strict=True)
        return [sample for group, values in pairs for sample in group_samples(group, values)]


def flat(trajectory):
    """Return the tokens of a trajectory and the mask of the sampled ones."""
    token_ids, chosen = [], []
    for turn in trajectory.turns:
        token_ids += turn.observation_ids + turn.action_ids
        chosen += [False] * len(turn.observation_ids) + [True] * len(turn.action_ids)
    return token_ids, chosen


def plain_logprobs(model, token_ids, sampled):
    logps = model(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(-1)
    places = [place for place, chosen in enumerate(sampled) if chosen]
    return torch.stack([logps[place - 1, token_ids[place]] for place in places])


@cache
def new_and_old(step):
    """Return the log-probs of every trajectory, under the model (with its graph) and under the older weights."""
    inputs = [(sample.token_ids, sample.loss_mask) for sample in step.samples()]
    new = [plain_logprobs(step.model, *each) for each in inputs]
    with torch.no_grad():
        return new, [plain_logprobs(step.old, *each) for each in inputs]


def tokens_and_weights(step, case):
    """Return all tokens of the step and their weights, without micro-batches."""
    samples, (new, old) = step.samples(), new_and_old(step)

    def sampled(values):
        return torch.cat(
            [torch.tensor(v, dtype=torch.float32)[s.loss_mask] for v, s in zip(values, samples, strict=True)]
        )

    rollout = sampled([s.logprobs for s in samples])
    tokens = TokenBatch(
        torch.cat(new),
        torch.cat(old) if case.anchor == "old" else rollout,
        sampled([s.advantages for s in samples]),
        rollout,
        torch.cat([torch.full([len(part)], number) for number, part in enumerate(new)]),
    )
    weights = [torch.from_numpy(w).float() for w in token_weights(samples, case.reduction, case.algorithm)]
    return tokens, torch.cat([w[s.loss_mask] for w, s in zip(weights, samples, strict=True)])


def losses_of(tokens, case):
    """Return the losses [N] and the weights [N] of the correction."""
    trainer = tokens.old_logprobs if case.anchor == "old" else tokens.logprobs.detach()
    weights = find_correction(case.correction)(trainer - tokens.behaviour, tokens, case.algorithm)
    return find_loss(case.loss)(tokens, case.algorithm)[0] * weights, weights


def expected_gradients(step, case):
    tokens, weights = tokens_and_weights(step, case)
    loss = weighted_sum(losses_of(tokens, case)[0], weights)
    return torch.autograd.grad(loss, list(step.model.parameters()), retain_graph=True)


class StalePolicy(Policy):
    """A policy whose old policy has other weights, as after the first optimiser step."""

    def __init__(self, model, old):
        super().__init__(model, None, entropy_gradient=True)
        self.old = Policy(old, None)

    def all_logprobs(self, batches):
        return self.old.all_logprobs(batches)


class Capture(Optimizer):
    """Optimiser that stores the gradients instead of applying them."""

    def step(self, step):
        self.grads = [p.grad.clone() for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return 0.0, 0.0


def updater_gradients(step, algorithm, way, tmp_path):
    config = Config(run_dir="unused", algorithm=replace(algorithm, drop_zero_advantage=way.drop))
    config.trainer = replace(config.trainer, max_tokens_per_microbatch=way.budget, packing=way.packing)
    optimizer = Capture(step.model, config.trainer.optimizer, 10)
    policy, reference = StalePolicy(step.model, step.old), Policy(step.old, None)
    updater_of(config, policy, reference, optimizer, tmp_path / "dump").run(step.samples(way.split), 0)
    return optimizer.grads


def assert_same(found, expected, tolerance, name=""):
    """Assert that gradients are equal up to a share of the largest component."""
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 1e-3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0, msg=lambda message: f"{name}: {message}")


@pytest.fixture(scope="module")
def step():
    """A step with a model that computes in float64 throughout (RMS norms would use float32)."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    return Step.make(model.eval().double())


@pytest.fixture(scope="module")
def expected(step):
    return {case: expected_gradients(step, case) for case in CASES}


@EVERY_CASE
def test_gradients_do_not_depend_on_batching(case, step, expected, tmp_path):
    of_tokens = case.reduction == "token_mean" and not case.per_trajectory and case != Case()
    for name in FEW_WAYS if of_tokens else WAYS:
        assert_same(updater_gradients(step, case.algorithm, WAYS[name], tmp_path), expected[case], EXACT, name)


@pytest.fixture(scope="module")
def tiny_step(tiny_model):
    """A step with the tiny policy, in float32."""
    return Step.make(copy.deepcopy(tiny_model))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.anchor == "rollout" and case.correction == "none"], ids=str
)
def test_gradients_in_float32_do_not_depend_on_batching(case, tiny_step, tmp_path):
    expected = expected_gradients(tiny_step, case)
    for name in ("some samples each", "a sample per turn, packed, some"):
        assert_same(updater_gradients(tiny_step, case.algorithm, WAYS[name], tmp_path), expected, 1e-5, name)


def test_gradients_of_kl_and_entropy_do_not_depend_on_batching(step, tmp_path):
    """Samples without an advantage have these terms too."""
    algorithm = replace(Case(reduction="sequence_mean").algorithm, kl_loss_coef=0.3, entropy_coef=0.2)
    found = {name: updater_gradients(step, algorithm, way, tmp_path) for name, way in WAYS.items()}
    for name, gradients in found.items():
        assert_same(gradients, found["all at once"], EXACT, name)
    plain = updater_gradients(step, Case(reduction="sequence_mean").algorithm, Way(), tmp_path)
    with pytest.raises(AssertionError):
        assert_same(plain, found["all at once"], 1e-2)


def distilled_gradients(step, distillation, case, top_k):
    """Return the gradients of the formula of distillation: each trajectory alone through the plain models."""
    samples = step.samples()
    weights = token_weights(samples, case.reduction, case.algorithm)
    total = torch.zeros((), dtype=torch.float64)
    for sample, weight in zip(samples, weights, strict=True):
        ids, mask = torch.tensor([sample.token_ids]), torch.tensor(sample.loss_mask)
        places = mask.nonzero().flatten() - 1
        student = step.model(ids).logits[0, places].log_softmax(-1)
        with torch.no_grad():
            teacher = step.old(ids).logits[0, places].log_softmax(-1)
        likely, chosen = teacher.topk(top_k).indices, ids[0, mask][:, None]
        is_left = (likely != chosen).all(1)
        sampled, rollout = student.gather(1, chosen)[:, 0], torch.tensor(sample.logprobs).double()[mask]
        advantages = distillation.reward_weight * torch.tensor(sample.advantages).double()[mask]
        advantages -= distillation.weight * is_left * (rollout - teacher.gather(1, chosen)[:, 0])
        losses, _ = losses_of(TokenBatch(sampled, rollout, advantages), case)
        summed = (student.exp() * (student - teacher)).detach() * student
        losses = losses + distillation.weight * summed.gather(1, likely).sum(1)
        total = total + (losses * torch.from_numpy(weight).double()[mask]).sum()
    return torch.autograd.grad(total, list(step.model.parameters()))


def test_gradients_of_the_teachers_top_tokens_are_those_of_the_formula(step, tmp_path):
    """The groups without an advantage from rewards are trained too, and all log-probs are computed in chunks."""
    case, top_k, chunk = Case(reduction="sequence_mean"), 5, 7 * step.model.config.vocab_size
    for name, way in WAYS.items():
        config = Config(run_dir="unused", algorithm=replace(case.algorithm, drop_zero_advantage=way.drop))
        config.trainer = replace(config.trainer, max_tokens_per_microbatch=way.budget, packing=way.packing)
        config.distillation.weight, config.distillation.top_k = 0.3, top_k
        config.distillation.teacher.path = "teacher"
        optimizer = Capture(step.model, config.trainer.optimizer, 10)
        updater = updater_of(config, Policy(step.model, None, max_logits=chunk), None, optimizer, tmp_path / "dump")
        updater.learners.rank_group.worker.teacher = Policy(step.old, None, max_logits=chunk)
        distillation = Distillation(LocalTeacher(updater.learners, top_k, way.budget), 0.3, reward_weight=0.5)
        credited = Credited(step.samples(way.split), step.advantages)
        distillation.apply(step.groups, credited, distillation.score(step.divided(way.split)))
        report = updater.run(credited.samples, 0).report
        assert_same(optimizer.grads, distilled_gradients(step, distillation, case, top_k), 1e-6, name)
        assert 0 < report.metrics()["train/top_k_mass"] < 1 and report.metrics()["train/top_k_kl"] != 0


@pytest.mark.parametrize("name", ["step", "tiny_step"])
@EVERY_CASE
def test_the_data_exceeds_every_bound(case, name, request):
    """Some tokens keep their gradient, some lose it, and some have it changed; otherwise the equalities would prove
    little."""
    tokens, weights = tokens_and_weights(request.getfixturevalue(name), case)
    (slope,) = torch.autograd.grad(weighted_sum(losses_of(tokens, case)[0], weights), tokens.logprobs)
    trained = tokens.advantages != 0
    share = (slope / -(tokens.advantages * weights))[trained]  # 1 where the loss is neither clipped nor corrected
    assert share.abs().max() > 0 and share.std() > 0.01
    difference = tokens.logprobs.detach() - tokens.old_logprobs
    for sign in (-1, 1):
        ratio = difference[tokens.advantages * sign > 0].exp()
        assert ratio.min() < LOW and ratio.max() > HIGH
    weights = losses_of(tokens, case)[1]
    assert case.correction == "none" or weights.unique().numel() > 1


def share_of(samples, rank, whole_trajectories):
    """Return every second sample, or every second trajectory."""
    order = list(dict.fromkeys((s.group_id, s.trajectory) for s in samples))
    places = [order.index((s.group_id, s.trajectory)) for s in samples] if whole_trajectories else range(len(samples))
    return [sample for sample, place in zip(samples, places, strict=True) if place % RANKS == rank]


def rank_gradients(step, case, rank):
    """Compute one rank's gradients: its own samples, the denominators of all ranks, and the sum over ranks."""
    mine = share_of(step.samples(split=True), rank, case.per_trajectory)
    totals = [Totals()] * RANKS
    dist.all_gather_object(totals, Totals.of(mine))
    weights = token_weights(mine, case.reduction, case.algorithm, sum(totals, Totals()))
    layout = (PADDED, PACKED)[rank]
    policy = StalePolicy(step.model, step.old)
    step.model.zero_grad()
    for batch in micro_batches(mine, weights, 64, layout=layout, whole_trajectories=case.per_trajectory):
        logprobs, _ = policy.logprobs(batch)
        old = policy.all_logprobs([batch])[0] if case.anchor == "old" else batch.rollout_logprobs
        tokens = TokenBatch(logprobs, old, batch.advantages, batch.rollout_logprobs, batch.trajectory)
        weighted_sum(losses_of(tokens, case)[0], batch.weights).backward()
    for parameter in step.model.parameters():
        dist.all_reduce(parameter.grad)
    return [parameter.grad.clone() for parameter in step.model.parameters()]


def work(rank, path):
    """One of the processes."""
    step = torch.load(path, weights_only=False)
    return {case: rank_gradients(step, case, rank) for case in CASES}


@pytest.fixture(scope="module")
def gradients_of_ranks(step, tmp_path_factory):
    """Return the gradients of every case on each process."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(step, folder / "step.pt")
    return run_ranks(RANKS, work, folder, folder / "step.pt")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@EVERY_CASE
def test_gradients_do_not_depend_on_the_number_of_ranks(case, gradients_of_ranks, expected):
    for found in gradients_of_ranks:
        assert_same(found[case], expected[case], EXACT)
