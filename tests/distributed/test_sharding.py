"""Models sharded over real processes give the same results and updates as one process."""

import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_models import KINDS, Experts, adamw, loss_of, make_batches, make_lm, make_model, without_tokens
from torch import nn
from torch.distributed.tensor import DTensor

from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.sharding import (
    compile_layers,
    compute_device,
    decoder_layers,
    full_state,
    is_sharded,
    load_state,
    named_tensors,
    needs_sharding,
    reduce_unused,
    reshard,
    shard,
    shard_from_leader,
)
from mtrl.errors import UserError
from mtrl.models.preparation import checkpoint_gradients
from mtrl.models.value_head import ValueModel

pytestmark = pytest.mark.xdist_group("sharding")  # one worker runs the ranks of `two_ranks`

STEPS = 2
RECEIVED = [*((kind, "default") for kind in KINDS), ("tied", "offload"), ("plain", "bfloat16")]
"""Kinds of models and settings with which ranks receive their slices from rank 0."""
LEARNED = [*RECEIVED, ("tied", "keep gathered"), ("bfloat16 with adapters", "default")]
"""Kinds of models and settings with which ranks learn that all load the weights."""
SETTINGS = {
    "default": FsdpConfig(),
    "keep gathered": FsdpConfig(reshard_after_forward=False),
    "offload": FsdpConfig(cpu_offload=True),
    "bfloat16": FsdpConfig(param_dtype="bfloat16"),
}


def world():
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def train(model, batches, steps=STEPS):
    """Make some optimiser steps on these batches. Return the losses, the norms of the gradients, and the first
    gradients."""
    optimizer = adamw(model)
    losses, norms, gradients = [], [], {}
    for _ in range(steps):
        losses.append(0.0)
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses[-1] += loss.item()
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9))))
        gradients = gradients or {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "norms": norms, "gradients": gradients}


def trained(model, settings, batches):
    """Return one rank's share of the training, and the weights before and after it."""
    model = shard(model, settings, world())
    before = full_state(model)
    return {**train(model, batches), "before": before, "after": full_state(model)}


def own(batches):
    return batches[dist.get_rank() :: dist.get_world_size()]


def learn_on_ranks(rank):
    return {pair: trained(make_model(pair[0]), SETTINGS[pair[1]], own(make_batches())) for pair in LEARNED}


def learn_with_idle_rank(rank):
    """Rank 0 has all tokens; the other rank has a batch without sampled tokens."""
    found = {}
    for kind, idle in [("plain", without_tokens), ("tied", filler), ("value", without_tokens), ("lora", filler)]:
        batches = make_batches(2)
        found[kind] = trained(make_model(kind), FsdpConfig(), [idle(b) for b in batches] if rank else batches)
    return found


def filler(batch):
    return batch.filler()


def learn_compiled_and_recomputed(rank):
    model = make_lm(layers=2)
    checkpoint_gradients(model, layers=1, offload=True)
    compile_eagerly(model)
    return trained(model, FsdpConfig(), own(make_batches(2)))


def compile_eagerly(model):
    compile_layers(model, backend="eager")


def learn_with_other_experts(rank):
    """Each rank uses an expert that the other does not."""
    model = shard(Experts(), FsdpConfig(), world())
    model(torch.ones(1, 4), expert=rank).sum().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def without_weights(kind):
    """Return a module as a follower makes it: on the meta device, with tied parameters tied."""
    if kind == "tied":
        with torch.device("meta"):
            return make_lm(tied=True)
    return make_model(kind).to("meta")


def receive_on_ranks(rank):
    """Rank 0 alone has the weights, and the other rank has none."""
    found = {}
    for kind, name in RECEIVED:
        module = shard_from_leader(without_weights(kind) if rank else make_model(kind), SETTINGS[name], world())
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        batches, before, parameters = own(make_batches()), full_state(module), len(list(module.parameters()))
        learned = train(module, batches)
        states = {"before": before, "after": full_state(module)}
        found[kind, name] = {**learned, **states, "buffers": buffers, "parameters": parameters}
    return found


def load_on_ranks(rank):
    """Whole weights are loaded by every rank. A misfit is raised on all ranks and changes no weight."""
    found = {}
    batch = make_batches(1)[0]
    for kind in KINDS:
        other = full_state(make_model(kind))
        other = {name: value + 0.01 for name, value in other.items()}
        model = shard(make_model(kind), FsdpConfig(), world())
        with torch.no_grad():
            loss_of(model, batch)  # leaves the root's weights gathered
        load_state(model, other)
        after = full_state(model)
        with torch.no_grad():
            loss = loss_of(model, batch)
        reshard(model)
        load_state(model, {name: value + 1 for name, value in other.items()})
        found[kind] = {"other": other, "after": after, "loss": loss, "each": full_state(model)}
    refused = []
    state = full_state(make_lm())
    for change in ({"lm_head.weight": None}, {"new": torch.ones(1)}, {"lm_head.weight": torch.ones(2, 2)}):
        changed = {name: value for name, value in {**state, **change}.items() if value is not None}
        model = shard(make_lm(), FsdpConfig(), world())
        with pytest.raises(ValueError) as error:
            load_state(model, changed)
        refused.append((str(error.value), full_state(model)))
    return {**found, "refused": refused}


def look_at_precision(rank):
    batch = make_batches(1)[0]
    model = shard(make_model("value"), SETTINGS["bfloat16"], world())
    lm = shard(make_lm(), SETTINGS["bfloat16"], world())
    seen = []
    lm.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with warnings.catch_warnings(action="error"):
        values = model(batch.action_mask, **batch.inputs)
    with torch.no_grad():
        loss_of(lm, batch)
    reshard(lm)
    return {"values": values.detach(), "inside": seen, "weights": {p.dtype for p in lm.parameters()}}


def play_on_ranks(rank):
    """Return the result of each function. The first passes of a process take longer than all others, so all tests share
    two processes."""
    functions = (
        learn_on_ranks,
        receive_on_ranks,
        learn_with_idle_rank,
        learn_compiled_and_recomputed,
        learn_with_other_experts,
        load_on_ranks,
        look_at_precision,
    )
    return {function: function(rank) for function in functions}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return `two_ranks(function)`, which returns the results of two processes."""
    found = run_ranks(2, play_on_ranks, tmp_path_factory.mktemp("ranks"))
    return lambda function: [rank[function] for rank in found]


def alone(model, batches):
    before = full_state(model)
    return {**train(model, batches), "before": before, "after": full_state(model)}


def assert_same(found, expected, tolerance=1e-5):
    """Assert that the results of ranks equal those of one process."""
    first = found[0]
    assert all(rank["before"] is None and rank["after"] is None for rank in found[1:])
    assert first["before"].keys() == expected["before"].keys() == first["after"].keys()
    assert all(torch.equal(first["before"][name], value) for name, value in expected["before"].items())
    losses = [sum(step) for step in zip(*(rank["losses"] for rank in found), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=tolerance)
    for rank in found:
        assert rank["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        torch.testing.assert_close(rank["gradients"], expected["gradients"], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(first["after"], expected["after"], rtol=tolerance, atol=tolerance)


def test_two_ranks_train_as_one_process_does(two_ranks):
    pairs = [*((kind, "default") for kind in KINDS), ("tied", "keep gathered"), ("tied", "offload")]
    found = two_ranks(learn_on_ranks)
    expected = {kind: alone(make_model(kind), make_batches()) for kind in KINDS}
    for pair in pairs:
        assert_same([rank[pair] for rank in found], expected[pair[0]])
    # Frozen weights in half precision and adapters in single precision are gathered together.
    half = [rank["bfloat16 with adapters", "default"] for rank in found]
    assert_same(half, alone(make_model("bfloat16 with adapters"), make_batches()), 1e-4)
    assert {value.dtype for value in half[0]["after"].values()} == {torch.bfloat16, torch.float32}


@pytest.mark.slow
def test_replicas_of_shards_train_as_one_process_does(tmp_path):
    found = run_ranks(4, learn_replicated, tmp_path)
    for kind in ("tied", "lora"):
        assert_same([rank[kind] for rank in found], alone(make_model(kind), make_batches()))
        assert {rank["held"] for rank in found} == {2}


def learn_replicated(rank):
    settings = FsdpConfig(replicas=2, timeout=77)
    found = {kind: trained(make_model(kind), settings, own(make_batches())) for kind in ("tied", "lora")}
    weight = shard(make_lm(), settings, world()).lm_head.weight
    for group in weight.device_mesh.get_all_groups():
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=settings.timeout)
    return {**found, "held": round(weight.numel() / weight.to_local().numel())}


def test_a_rank_without_work_runs_fillers(two_ranks):
    found = two_ranks(learn_with_idle_rank)
    for kind in KINDS:
        assert_same([rank[kind] for rank in found], alone(make_model(kind), make_batches(2)))


def test_layers_are_compiled_and_recomputed_under_sharding(two_ranks):
    assert_same(two_ranks(learn_compiled_and_recomputed), alone(make_lm(layers=2), make_batches(2)))


def test_computation_in_bfloat16_updates_weights_in_float32(two_ranks):
    found = [rank["plain", "bfloat16"] for rank in two_ranks(learn_on_ranks)]
    expected = alone(make_lm(), make_batches())["losses"]
    losses = [sum(step) for step in zip(*(rank["losses"] for rank in found), strict=True)]
    assert losses == pytest.approx(expected, abs=0.1) and losses != pytest.approx(expected, abs=1e-4)
    assert all(value.dtype == torch.float32 for value in found[0]["after"].values())
    moved = [(v - found[0]["before"][n]).abs().max() for n, v in found[0]["after"].items()]
    assert 0 < max(moved) < 4e-3  # steps of 1e-3, which bfloat16 would round away


def test_values_keep_their_precision_where_the_body_is_in_bfloat16(two_ranks):
    for found in two_ranks(look_at_precision):
        values = found["values"]
        assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
        assert found["inside"] == [torch.bfloat16] and found["weights"] == {torch.float32}


def test_ranks_can_use_different_experts(two_ranks):
    found = two_ranks(learn_with_other_experts)
    model = Experts()
    sum(model(torch.ones(1, 4), expert=expert).sum() for expert in (0, 1)).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    for gradients in found:
        torch.testing.assert_close(gradients, expected)


def test_whole_weights_arrive_on_all_ranks(two_ranks):
    first, second = two_ranks(load_on_ranks)
    for kind in KINDS:
        other = first[kind]["other"]
        assert all(torch.equal(first[kind]["after"][name], value) for name, value in other.items())
        assert all(torch.equal(first[kind]["each"][name], value + 1) for name, value in other.items())
        model = make_model(kind)
        load_state(model, other)
        expected = loss_of(model, make_batches(1)[0])
        for found in (first, second):
            torch.testing.assert_close(found[kind]["loss"], expected.detach())
    for (error, after), (second_error, _), words in zip(
        first["refused"],
        second["refused"],
        (
            "missing ['lm_head.weight'], unexpected []",
            "missing [], unexpected ['new']",
            "lm_head.weight is [2, 2], not",
        ),
        strict=True,
    ):
        assert error == second_error and words in error
        assert all(torch.equal(after[name], value) for name, value in full_state(make_lm()).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_module_returns_and_loads_whole_weights(kind):
    model, other = make_model(kind), make_model(kind)
    state = full_state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    load_state(other, full_state(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    load_state(other, state)  # the copies did not change
    assert all(torch.equal(a, b) for a, b in zip(make_model(kind).parameters(), other.parameters(), strict=True))


def test_tied_weights_are_listed_once_and_loaded_by_either_name():
    model = make_lm(tied=True)
    state = full_state(model)
    assert "lm_head.weight" not in state and "lm_head.weight" in model.state_dict()
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight") + 1
    load_state(model, state)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def test_trainable_only_returns_the_adapters():
    model = make_model("lora")
    names = named_tensors(model, trainable_only=True)
    assert names and all("lora_" in name for name in names) and len(names) < len(named_tensors(model))
    with pytest.raises(ValueError, match=r"missing \['base_model"):
        load_state(model, {name: value.clone() for name, value in names.items()})
    load_state(model, {name: value + 1 for name, value in full_state(model, True).items()}, trainable_only=True)
    assert all(p.mean() > 0.5 for name, p in model.named_parameters() if "lora_" in name)


def test_one_process_is_sharded_for_mixed_precision_or_offload():
    one = SimpleNamespace(rank=0, size=1)
    assert not needs_sharding(FsdpConfig(), one) and needs_sharding(FsdpConfig(), SimpleNamespace(rank=0, size=2))
    assert needs_sharding(FsdpConfig(param_dtype="bfloat16"), one) and needs_sharding(FsdpConfig(cpu_offload=True), one)
    assert not dist.is_initialized()
    try:
        model = shard(make_lm(), FsdpConfig(cpu_offload=True), one)
        assert is_sharded(model) and compute_device(model) == torch.device("cpu")
        assert_same([trained_alone(model)], alone(make_lm(), make_batches()))
    finally:
        dist.destroy_process_group()


def trained_alone(model):
    before = full_state(model)
    return {**train(model, make_batches()), "before": before, "after": full_state(model)}


def test_replicas_that_do_not_divide_the_ranks_are_an_error():
    with pytest.raises(UserError, match="trainer.fsdp.replicas=3 does not divide the 4 ranks; use a divisor of 4"):
        shard(make_lm(), FsdpConfig(replicas=3), SimpleNamespace(rank=0, size=4))


def test_decoder_layers_are_found_in_any_architecture():
    lm = make_lm(layers=2)
    assert decoder_layers(lm) == list(lm.model.layers)
    assert decoder_layers(ValueModel(lm)) == list(lm.model.layers)
    adapted = make_model("lora")
    assert decoder_layers(adapted) == list(adapted.base_model.model.model.layers)
    experts = Experts()
    assert decoder_layers(experts) == list(experts.blocks)  # not the longer list of experts in each layer
    assert decoder_layers(nn.Linear(2, 2)) == []


def test_compiling_a_model_without_layers_is_an_error():
    with pytest.raises(UserError, match="trainer.compile=true: Linear has no list of layers"):
        compile_layers(nn.Linear(2, 2))


def test_compiled_layers_have_the_same_names_and_results():
    model = make_lm()
    names, batch = list(model.state_dict()), make_batches(1)[0]
    expected = loss_of(model, batch)
    compile_eagerly(model)
    torch.testing.assert_close(loss_of(model, batch), expected)
    assert list(model.state_dict()) == names


def test_recomputed_layers_run_compiled_code():
    """Transformers checkpoints inside of a layer's forward pass, where PyTorch would compile nothing."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, batch = make_lm(layers=2), make_batches(1)[0]
    loss_of(model, batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    checkpoint_gradients(model)
    compile_layers(model, backend)
    loss_of(model, batch).backward()
    assert sum(len(graph.graph.nodes) for graph in graphs) > 20, "norms, projections and the MLP are compiled"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


def test_an_older_torch_shards_all_models_but_those_with_separate_experts():
    """A module without FSDP lacks the method, as sharded modules of torch 2.11 and 2.12 do."""
    reduce_unused(make_lm(), ranks=2)
    reduce_unused(Experts(), ranks=1)
    with pytest.raises(
        UserError, match="cannot shard the separate experts of Experts over 2 ranks; install torch 2.13"
    ):
        reduce_unused(Experts(), ranks=2)


def test_ranks_receive_their_slices_from_rank_0(two_ranks):
    """The training is that of ranks which all load the weights, bit for bit."""
    each = two_ranks(learn_on_ranks)
    first, second = two_ranks(receive_on_ranks)
    for pair in RECEIVED:
        for key in ("before", "after", "gradients"):
            expected = each[0][pair][key]
            assert expected.keys() == first[pair][key].keys()
            assert all(torch.equal(value, first[pair][key][name]) for name, value in expected.items()), (pair, key)
        for rank, found in enumerate((first, second)):
            assert found[pair]["losses"] == each[rank][pair]["losses"]
            assert found[pair]["norms"] == each[rank][pair]["norms"]
        assert first[pair]["parameters"] == second[pair]["parameters"], "tied parameters stay tied"
        assert first[pair]["buffers"].keys() == second[pair]["buffers"].keys()
        for name, value in first[pair]["buffers"].items():
            assert torch.equal(value, second[pair]["buffers"][name])


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_rounded_before_they_are_gathered(sharded, monkeypatch):
    """The bits are those of whole weights that are rounded, and half as many bytes are gathered."""
    expected = {name: value.to(torch.bfloat16) for name, value in full_state(make_lm()).items()}
    module = shard(make_lm(), FsdpConfig(), SimpleNamespace(rank=0, size=1)) if sharded else make_lm()
    gathered = []
    monkeypatch.setattr(DTensor, "full_tensor", recording_bytes(gathered))
    found = full_state(module, dtype=torch.bfloat16)
    assert all(torch.equal(value, found[name]) for name, value in expected.items()) and found.keys() == expected.keys()
    assert sum(gathered) == (sum(value.nbytes for value in expected.values()) if sharded else 0)
    assert {value.dtype for value in full_state(module, dtype=torch.float64).values()} == {torch.float32}


def recording_bytes(sizes, gather=DTensor.full_tensor):
    """Return the function that gathers a tensor, which first adds the bytes of the whole tensor to `sizes`."""

    def gathered(value):
        sizes.append(value.numel() * value.element_size())
        return gather(value)

    return gathered
