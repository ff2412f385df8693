"""The optimiser: numbers, names and devices of its moments, for one process and for parameters sharded over two
ranks."""

import copy
import math

import pytest
import torch
from torch import nn

from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.errors import UserError
from mtrl.trainer.update.optimizer import Optimizer, clip_gradients, is_fused, lr_scale
from tests.distributed.ranks import run_ranks

CONFIG = OptimizerConfig(lr=1e-2, max_grad_norm=0.5, schedule="linear", warmup_steps=2, weight_decay=0.1)
TOTAL = 9


class Small(nn.Module):
    """A model with two layers, a frozen one, and a tied weight; no size is divisible by two ranks."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(5, 3)
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in (*self.layers, self.frozen):
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def loss(model, step):
    ids = torch.tensor([step % 5, (2 * step + 1) % 5, 3])
    return model(ids.to(model.embedding.weight.device)).log_softmax(-1)[:, step % 5].sum()


def train(model, optimizer, steps, scale=1.0):
    """Return norm and learning rate of each step."""
    results = []
    for step in steps:
        (scale * loss(model, step)).backward()
        results.append(optimizer.step(step))
    return results


def test_the_optimizer_is_adamw_with_clipping():
    model, twin = Small(), Small()
    steps = train(model, Optimizer(model, CONFIG, TOTAL), range(6))
    trained = [p for p in twin.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, (norm, rate) in enumerate(steps):
        loss(twin, step).backward()
        assert norm == nn.utils.clip_grad_norm_(trained, 0.5).item()
        assert rate == CONFIG.lr * lr_scale(CONFIG, step, TOTAL)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad()
    assert max(norm for norm, _ in steps) > 0.5  # else nothing was clipped
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_state_is_by_name():
    model = Small()
    optimizer = Optimizer(model, CONFIG, TOTAL)
    assert optimizer.state() == {}
    train(model, optimizer, range(2))
    trained = ["embedding.weight", *(f"layers.{i}.{part}" for i in (0, 1) for part in ("weight", "bias"))]
    state = optimizer.state()
    assert sorted(state) == sorted(f"{name}.{key}" for name in trained for key in ("step", "exp_avg", "exp_avg_sq"))
    assert state["layers.1.weight.step"].item() == 2
    assert state["layers.1.weight.exp_avg"].shape == (3, 3)


@pytest.mark.parametrize("how", ["load", "allocate"])
@pytest.mark.parametrize("used", [False, True], ids=["new", "stepped"])
def test_the_optimizer_continues_from_a_state(how, used):
    straight = Small()
    train(straight, Optimizer(straight, CONFIG, TOTAL), range(6))
    model = Small()
    first = Optimizer(model, CONFIG, TOTAL)
    train(model, first, range(3))
    saved = {name: value.clone() for name, value in first.state().items()}
    weights = copy.deepcopy(model.state_dict())
    second = Optimizer(model, CONFIG, TOTAL)
    if used:
        train(model, second, range(2))
        model.load_state_dict(weights)
    if how == "load":
        second.load(saved)
    else:
        places = second.allocate(saved)
        assert places.keys() == saved.keys()
        for name, place in places.items():
            place.copy_(saved[name])
    assert all(torch.equal(value, saved[name]) for name, value in second.state().items())
    train(model, second, range(3, 6))
    for mine, theirs in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parameters_without_a_gradient_have_no_state():
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "idle": nn.Linear(2, 1)})
    optimizer = Optimizer(model, CONFIG, TOTAL)
    model["used"](torch.ones(2)).backward()
    optimizer.step(0)
    state = optimizer.state()
    assert {name.split(".")[0] for name in state} == {"used"}
    other = Optimizer(model, CONFIG, TOTAL)
    other.load(state)
    assert other.state().keys() == state.keys()


def test_a_state_of_other_parameters_is_an_error():
    optimizer = Optimizer(Small(), CONFIG, TOTAL)
    with pytest.raises(UserError, match=r"not trained here \(frozen\.weight\); continue with the model"):
        optimizer.allocate(["layers.0.weight.exp_avg", "frozen.weight.exp_avg"])
    with pytest.raises(UserError, match=r"\(0, 1, …\)"):
        optimizer.load({f"{index}.exp_avg": torch.zeros(3) for index in range(3)})


def test_clipping_without_gradients():
    model = Small()
    assert clip_gradients([list(model.parameters())], 1.0) == 0.0
    assert Optimizer(model, CONFIG, TOTAL).step(0)[0] == 0.0


def test_offloaded_moments_are_in_cpu_memory_between_steps(monkeypatch):
    """The GPU is simulated: its tensors have shapes and devices, and no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    locked = []
    monkeypatch.setattr("mtrl.trainer.update.optimizer.clip_gradients", lambda groups, limit: 1.0)
    monkeypatch.setattr("mtrl.trainer.update.optimizer.pinned", lambda tensor: locked.append(tensor) or tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterDict({"weight": nn.Parameter(torch.empty(3, 2, device="cuda"))})
        for offload, between in ((True, "cpu"), (False, "cuda")):
            optimizer = Optimizer(model, OptimizerConfig(offload=offload), TOTAL)
            seen, _ = [], locked.clear()
            monkeypatch.setattr(torch.optim.AdamW, "step", recording(seen))
            for step in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step(step)
                assert {value.device.type for name, value in optimizer.state().items() if "exp_avg" in name} == {
                    between
                }
            assert set(seen) == {"cuda"}
            assert len(locked) == 2 * offload, "the memory of each moment is locked once"
            places = Optimizer(model, OptimizerConfig(offload=offload), TOTAL).allocate(["weight.exp_avg"])
            assert places["weight.exp_avg"].device.type == between


def test_adamw_is_fused_on_gpus_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert is_fused(list(Small().parameters())) is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(3, 2, device="cuda"))]
        assert is_fused(parameters)
        optimizer = Optimizer(nn.ParameterDict({"weight": parameters[0]}), CONFIG, TOTAL)
        state = optimizer.allocate(["weight.step", "weight.exp_avg"])
        assert {value.device.type for value in state.values()} == {"cuda"}, "as fused AdamW makes them"


def recording(seen, step=torch.optim.AdamW.step):
    """Return AdamW's step, which first adds the devices of its moments to `seen`."""

    def recorded(adam):
        seen.extend(values[key].device.type for values in adam.state.values() for key in ("exp_avg", "exp_avg_sq"))
        return step(adam)

    return recorded


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_changes_no_number():
    model, twin = Small().cuda(), Small().cuda()
    train(model, Optimizer(model, OptimizerConfig(lr=1e-2, offload=True), TOTAL), range(4))
    train(twin, Optimizer(twin, OptimizerConfig(lr=1e-2), TOTAL), range(4))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


CASES = ("sharded", "offloaded", "mixed")


def shard(model, case):
    """Shard the whole model, the whole model with CPU offload, or only its layers, so that the embedding stays
    plain."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=False) if case == "offloaded" else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, offload_policy=policy)
    if case != "mixed":
        fully_shard(model, offload_policy=policy, ignored_params=set(model.frozen.parameters()))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def train_ranks(model, optimizer, steps, ranks):
    """Train with a share of the loss on each rank; gradients of plain parameters are summed by hand."""
    import torch.distributed as dist

    results = []
    for step in steps:
        (loss(model, step) / ranks).backward()
        for parameter in optimizer.parameters:
            if not hasattr(parameter, "device_mesh"):
                dist.all_reduce(parameter.grad)
        results.append(optimizer.step(step))
    return results


def whole(tensors):
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for name, t in tensors}


def of_rank(rank, straight):
    """Return per case the norms, weights and moments of six steps, and those with a fresh optimiser after the third."""
    found = {}
    for case in CASES:
        model = shard(Small(), case)
        optimizer = Optimizer(model, CONFIG, TOTAL)
        steps = train_ranks(model, optimizer, range(3), 2)
        shards = {name: value.clone() for name, value in optimizer.state().items()}
        optimizer = Optimizer(model, CONFIG, TOTAL)
        optimizer.load(shards if case == "sharded" else whole(shards.items()))  # from shards, or from whole tensors
        steps += train_ranks(model, optimizer, range(3, 6), 2)
        before = whole(model.named_parameters())
        (math.inf * loss(model, 6)).backward()
        spoilt = optimizer.step(6)[0]
        untouched = all(torch.equal(before[name], value) for name, value in whole(model.named_parameters()).items())
        found[case] = steps, before, whole(optimizer.state().items()), spoilt, untouched
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(2, of_rank, tmp_path_factory.mktemp("ranks"), None)


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_step_as_one_process(case, found):
    model = Small()
    optimizer = Optimizer(model, CONFIG, TOTAL)
    expected = train(model, optimizer, range(6))
    assert max(norm for norm, _ in expected) > CONFIG.max_grad_norm
    for steps, weights, moments, spoilt, untouched in (rank[case] for rank in found):
        assert steps == [(pytest.approx(norm, rel=1e-5), rate) for norm, rate in expected]
        torch.testing.assert_close(weights, whole(model.named_parameters()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moments, optimizer.state(), rtol=1e-4, atol=1e-7)
        assert not math.isfinite(spoilt) and untouched
