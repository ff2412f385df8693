"""Tensors are read back bit for bit, on any number of ranks."""

import json
import pickle
import resource
import shutil

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mtrl.errors import UserError
from mtrl.trainer.checkpoint.checkpoint import Checkpoints, read_checkpoint
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import load_tensors, read_tensors, tensor_names


def whole():
    """Return the same tensors on every rank: even and odd numbers of rows, fewer rows than ranks, no rows, scalars."""
    torch.manual_seed(5)
    return {
        "model.body.weight": torch.randn(8, 3),
        "model.body.half": torch.randn(7, 2).bfloat16(),
        "model.norm": torch.randn(1),
        "model.nothing": torch.zeros(0, 4),
        "optimizer.body.weight.exp_avg": torch.randn(8, 3),
        "optimizer.body.weight.step": torch.tensor(12.0),
        "critic.model.counts": torch.arange(18).reshape(3, 2, 3),
    }


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in whole().items()}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )


def written(folder, tensors, name="c"):
    path = folder / name
    path.mkdir(parents=True)
    Saver().save(tensors, path)
    return path


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_one_process_reads_the_tensors_that_it_wrote(tmp_path_factory, data):
    """Tensors have any dtype and shape; some share storage, are transposed, or belong to a graph."""
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    tensors = {}
    for number in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        seed = data.draw(st.integers(0, 99))
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9)
        tensors[f"model.{number}"] = tensor.to(data.draw(st.sampled_from(kinds)))
    fused = torch.arange(24.0).reshape(6, 4)
    tensors |= {"model.q": fused[:2], "model.kv": fused[2:], "model.turned": fused.T}
    tensors["optimizer.q.exp_avg"] = torch.ones(2, 4, requires_grad=True)
    path = written(tmp_path_factory.mktemp("c"), tensors)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(into, path)
    assert same(into, {name: tensor.detach() for name, tensor in tensors.items()})
    assert sorted(tensor_names(path)) == sorted(tensors)


def test_the_files_of_one_process_are_plain_safetensors(tmp_path):
    path = written(tmp_path, whole())
    assert {file.name for file in path.iterdir()} == {
        "tensors.json", "model.safetensors", "optimizer.safetensors", "critic.safetensors", "SHA256SUMS",
    }  # fmt: skip
    model = safetensors.torch.load_file(path / "model.safetensors")
    assert same(model, {n.removeprefix("model."): t for n, t in whole().items() if n.startswith("model.")})
    assert same(read_tensors(path, "model"), model)


def test_one_part_can_be_read_without_the_others(tmp_path):
    path = written(tmp_path, whole())
    (path / "optimizer.safetensors").unlink()
    into = {name: tensor for name, tensor in zeros().items() if name.startswith("model.")}
    load_tensors(into, path)
    assert all(torch.equal(tensor, whole()[name]) for name, tensor in into.items())


def test_values_are_cast_to_the_dtype_of_the_target(tmp_path):
    path = written(tmp_path, {"model.w": torch.tensor([1.0, 2.5])})
    into = {"model.w": torch.zeros(2, dtype=torch.bfloat16)}
    load_tensors(into, path)
    assert into["model.w"].tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda t: t.pop("model.norm"), "unexpected: model.norm;"),
        (lambda t: t.update({"model.new": torch.zeros(1)}), "missing: model.new;"),
        (lambda t: t.update({"model.norm": torch.zeros(2)}), r"other shapes: model.norm \(1,\) for \(2,\);"),
        (lambda t: t.update({f"model.{n}": torch.zeros(1) for n in "abc"}), "missing: model.a, model.b and 1 more;"),
        (lambda t: t.update({"adapter.a": torch.zeros(1)}), "missing: adapter.a;"),
    ],
)
def test_a_misfit_is_an_error_in_one_sentence_and_changes_nothing(tmp_path, change, sentence):
    path, into = written(tmp_path, whole()), zeros()
    change(into)
    with pytest.raises(UserError, match=f"checkpoint {path} does not fit the model and the settings: {sentence}"):
        load_tensors(into, path)
    assert not any(tensor.any() for tensor in into.values())


def _cut(path):
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])


def _another_models(path):
    safetensors.torch.save_file({"body.weight": torch.zeros(2, 3)}, path / "model.safetensors")


def _index(change):
    def damage(path):
        index = json.loads((path / "tensors.json").read_text())
        change(index["model.body.weight"])
        (path / "tensors.json").write_text(json.dumps(index))

    return damage


def _overlapping(stored):
    """Return two chunks with as many cells as the tensor, which overlap and leave cells out."""
    half = [stored["shape"][0] // 2, *stored["shape"][1:]]
    chunk = {**stored["chunks"][0], "sizes": half}
    return [chunk, {**chunk, "offsets": [1, *chunk["offsets"][1:]]}]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "model.safetensors").write_bytes(b"rubbish"),
        _cut,
        _another_models,
        lambda path: (path / "tensors.json").write_text("{"),
        lambda path: (path / "tensors.json").write_text("[]"),
        _index(lambda stored: stored["chunks"].clear()),
        _index(lambda stored: stored.update(dtype="nn")),
        _index(lambda stored: stored.pop("shape")),
        _index(lambda stored: stored["chunks"][0].update(file="../model.safetensors")),
        _index(lambda stored: stored["chunks"][0].update(offsets=[1, 0])),
        _index(lambda stored: stored["chunks"][0].update(offsets="x")),
        _index(lambda stored: stored["chunks"][0]["sizes"].pop()),
        _index(lambda stored: stored["chunks"].__setitem__(slice(None), _overlapping(stored))),
    ],
)
def test_damage_is_an_error_in_one_sentence(tmp_path, damage):
    path = written(tmp_path, whole())
    damage(path)
    with pytest.raises(UserError, match=f"checkpoint {path} cannot be read .*; no other one in .* is intact"):
        load_tensors(zeros(), path)


def test_a_pickle_is_never_opened(tmp_path):
    """The index of PyTorch's own storage format is a pickle. A pickle in the folder has no effect."""

    class Harm:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    path = written(tmp_path, whole())
    (path / ".metadata").write_bytes(pickle.dumps(Harm()))
    (path / "model.pt").write_bytes(pickle.dumps(Harm()))
    load_tensors(zeros(), path)


def test_a_checkpoint_of_an_older_version_is_distinguished_from_a_damaged_one(tmp_path):
    path = tmp_path / "step_000003"
    path.mkdir()
    safetensors.torch.save_file({"w": torch.zeros(2)}, path / "model.safetensors")
    (path / "state.json").write_text('{"step": 3}')
    for read in (read_checkpoint, tensor_names, lambda path: load_tensors({}, path)):
        with pytest.raises(UserError, match="an older version of mtrl wrote it, .*: model=hf model.path=RUN/export$"):
            read(path)


@pytest.mark.parametrize("name", ["weight", ".weight", "model."])
def test_a_name_without_a_part_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match=r"PART\.NAME"):
        Saver().save({name: torch.zeros(1)}, tmp_path)


LAYOUTS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]
"""Layouts: number of replicas, and of shards per replica."""


def _spread(tensors, ranks, replicas):
    """Turn tensors with rows into DTensors, sharded over `ranks` and replicated `replicas` times; scalars stay
    plain."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(replicas, -1), mesh_dim_names=("replica", "shard"))
    placements = [Replicate(), Shard(0)]
    return {n: distribute_tensor(t, mesh, placements) if t.dim() else t for n, t in tensors.items()}


def _every_layout(folder):
    """Save in each layout and read in each. Return the pairs that differ. Ranks outside of a layout do not take
    part."""
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    wrong, rank = [], dist.get_rank()
    for replicas, shards in LAYOUTS:
        ranks = list(range(replicas * shards))
        path = folder / f"{replicas}x{shards}"
        if rank == 0:
            path.mkdir()
        dist.barrier()
        tensors = _spread(whole(), ranks, replicas)  # all ranks must create the mesh
        if rank in ranks:
            Saver(groups[len(ranks)]).save(tensors, path)
        dist.barrier()
        for layout in LAYOUTS:
            readers = list(range(layout[0] * layout[1]))
            into = _spread(zeros(), readers, layout[0])
            if rank in readers:
                load_tensors(into, path)
                found = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in into.items()}
                wrong += [] if same(found, whole()) else [(rank, path.name, layout)]
    return wrong


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A folder with checkpoints of every layout, each read in all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    assert on_ranks(4, folder, _every_layout, folder) == [[]] * 4
    return folder


@pytest.mark.parametrize("replicas, shards", LAYOUTS)
def test_a_checkpoint_can_be_read_on_any_number_of_ranks(layouts, replicas, shards):
    path, into = layouts / f"{replicas}x{shards}", zeros()
    load_tensors(into, path)
    assert same(into, whole())
    stored = [t for file in path.glob("*.safetensors") for t in safetensors.torch.load_file(file).values()]
    assert sum(t.nbytes for t in stored) == sum(t.nbytes for t in whole().values()), "replicas are written once"
    if replicas * shards > 1:
        shares = [sum(f.stat().st_size for f in path.glob(f"*-rank{rank}.*")) for rank in range(replicas * shards)]
        assert min(shares) > 0, "the ranks that hold replicas share the work"


def test_a_missing_file_of_one_rank_is_an_error(layouts, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(layouts / "1x4", path)
    (path / "model-rank1.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot be read \(model-rank1.safetensors: .*; no other one"):
        load_tensors(zeros(), path)


def _save_where_one_sees_nothing(folder):
    """Save with a different folder on rank 1, as on a local disk."""
    partial = folder / f".partial-step_000002-{dist.get_rank() or 'leader'}"
    with pytest.raises(UserError) as caught:
        Saver(dist.group.WORLD).save({"model.w": torch.zeros(3), "model.v": torch.zeros(3)}, partial)
    return str(caught.value)


def test_a_file_system_that_is_not_shared_is_an_error(tmp_path):
    (tmp_path / ".partial-step_000002-leader").mkdir()
    one, other = on_ranks(2, tmp_path, _save_where_one_sees_nothing, tmp_path)
    assert one == other and "rank 1: the folder is not there; all ranks need a file system that they share" in one


def _train(model, optimizer, steps):
    for step in range(steps):
        model(torch.full((3, 5), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _state(model, optimizer):
    """Return the state with the names of a learner; missing moments are created."""
    tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if not optimizer.state[p]:
            optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": p * 0.0, "exp_avg_sq": p * 0.0}
            optimizer.state[p] = {key: value.detach() for key, value in optimizer.state[p].items()}
        tensors |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[p].items()}
    return tensors


def _train_and_save(folder):
    """Train two ranks on the same batch with half weights, since gradients are summed, and save."""
    model = fully_shard(_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, 2)
    Saver(dist.group.WORLD).save(_state(model, optimizer), folder)
    _train(model, optimizer, 2)
    return {name: p.full_tensor().tolist() for name, p in model.named_parameters()}


def test_a_sharded_run_continues_in_one_process(tmp_path):
    """The sum of two half gradients equals the gradient of one process."""
    folder = tmp_path / "step"
    folder.mkdir()
    wanted, _ = on_ranks(2, tmp_path, _train_and_save, folder)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = _state(model, optimizer)
    load_tensors(state, folder)
    assert optimizer.state[model[0].weight]["step"] == 2 and optimizer.state[model[0].weight]["exp_avg"].any()
    for (name, p), fresh in zip(model.named_parameters(), _model().parameters(), strict=True):
        assert not torch.equal(p, fresh), name
    _train(model, optimizer, 2)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), torch.tensor(wanted[name]), rtol=1e-6, atol=1e-7)


def _save_with_one_full_disk(folder):
    partial = folder / ".partial-step_000002-x"
    if dist.get_rank() == 1:  # a limit on file sizes fails writes in the middle, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    big = {"model.w": torch.ones(64, 1000)}
    try:
        Saver(dist.group.WORLD).save(_spread(big, [0, 1], 1), partial)
    except UserError as error:
        dist.barrier()
        return str(error), partial.exists()


def test_all_ranks_raise_the_error_of_a_rank_that_cannot_write(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    partial = checkpoints.begin(1)
    Saver().save(whole(), partial)
    last = checkpoints.commit(partial, {"step": 1})
    (checkpoints.folder / ".partial-step_000002-x").mkdir()
    (one, there), (other, _) = on_ranks(2, tmp_path, _save_with_one_full_disk, checkpoints.folder)
    assert one == other and not there
    assert "step_000002 could not be written (rank 1: " in one and f"the last complete one is {last}; free some" in one
    shutil.rmtree(last)
    assert not list(checkpoints.folder.iterdir())
