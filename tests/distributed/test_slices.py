"""A rank's slices from files are those that PyTorch's own division of the whole tensor gives."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rank_groups import run_ranks_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from sharded_models import make_lm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.sharding import full_state, shard_from_leader
from mtrl.distributed.slices import every_rank_has, own_indices, read_slice
from mtrl.models.stored_tensors import FileTensor
from mtrl.models.weight_files import SINGLE, file_tensors, model_in_files

SHAPES = [(1,), (3,), (8,), (5, 3), (8, 7), (2, 3, 4)]
PLACEMENTS = {
    "sharded": ((4,), [Shard(0)]),
    "replicas of shards": ((2, 2), [Replicate(), Shard(0)]),
    "divided by rows": ((2, 2), [Shard(0), Shard(0)]),
    "divided by columns": ((2, 2), [Shard(0), Shard(1)]),
    "in strides": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "replicas of strides": ((1, 2, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
}


def divided(rank, folder):
    """Return how many parts were compared, and how many of them were empty."""
    parts = empty = 0
    for sizes, placements in PLACEMENTS.values():
        mesh = init_device_mesh("cpu", sizes)
        for shape in SHAPES:
            if any(p.dim >= len(shape) for p in placements if not p.is_replicate()):
                continue
            name = "x".join(map(str, shape))
            whole = load_file(folder / SINGLE)[name]
            strided = any(isinstance(p, _StridedShard) for p in placements)
            if strided and shape[0] % 4:
                continue  # FSDP2 refuses to shard such a tensor that is divided already
            given = distribute_tensor(whole.float(), mesh, placements, src_data_rank=None)
            filled = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
            read_slice(filled, FileTensor(str(folder / SINGLE), name, shape))
            assert torch.equal(filled.to_local(), given.to_local()), (placements, shape)
            found = [own_indices(given, dimension) for dimension in range(whole.dim())]
            local, offset = compute_local_shape_and_global_offset(given.shape, mesh, placements)
            assert tuple(map(len, found)) == local == given.to_local().shape
            if given.to_local().numel():
                assert [int(rows[0]) for rows in found] == list(offset)
            parts, empty = parts + 1, empty + (given.to_local().numel() == 0)
    return parts, empty


def test_every_division_is_read(tmp_path):
    generator = torch.Generator().manual_seed(0)
    state = {"x".join(map(str, shape)): torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES}
    save_file(state, tmp_path / SINGLE)
    results = run_ranks(4, divided, tmp_path, tmp_path)
    assert {parts for parts, _ in results} == {25} and sum(empty for _, empty in results) > 3


def world():
    return SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())


def received(rank, place):
    """Return for each case whether the ranks read slices, and the whole weights on rank 0. A path below the working
    folder of a process names other files on each rank, as a path on another machine may."""
    found = {}
    for case in ("shared", "without weights", "other weights"):
        os.chdir(place / (case if rank and case != "shared" else "leader"))
        with torch.device("meta"):
            structure = make_lm()
        model = structure if rank else model_in_files(structure, "/proc/self/cwd", torch.float32)
        stored = [*file_tensors(model).values()]
        module = shard_from_leader(model, FsdpConfig(), world())
        dist.broadcast_object_list(box := [stored], src=0)
        found[case] = every_rank_has(box[0]), full_state(module)
    return found


def test_rank_0_sends_the_weights_if_a_rank_has_other_files(tmp_path):
    expected = make_lm().bfloat16()
    expected.save_pretrained(tmp_path / "leader")
    shutil.copytree(tmp_path / "leader", tmp_path / "other weights")
    make_lm(seed=1).bfloat16().save_pretrained(tmp_path / "other weights")
    shutil.copytree(tmp_path / "leader", tmp_path / "without weights", ignore=shutil.ignore_patterns(SINGLE))
    leader, follower = run_ranks(2, received, tmp_path, tmp_path)
    assert [shared for shared, _ in leader.values()] == [True, False, False]
    assert [shared for shared, _ in follower.values()] == [True, False, False]
    for _, state in leader.values():
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[name], value.float()) for name, value in expected.state_dict().items())


VANISHING = """
import os, sys
from contextlib import closing
import torch
sys.path.insert(0, {tests!r})
from sharded_models import make_lm
from mtrl.config.trainer_schema import FsdpConfig
from mtrl.distributed.sharding import shard_from_leader
from mtrl.distributed.world import World
from mtrl.models.weight_files import SINGLE, model_in_files

os.chdir(f"{folder}/{{os.environ['RANK']}}")
with torch.device("meta"):
    model = make_lm()

class Removing(type(model)):
    def to_empty(self, **kwargs):  # after the ranks have agreed that all have the files
        os.remove(SINGLE)
        return super().to_empty(**kwargs)

try:
    with closing(World.join(30.0)) as world:
        if world.is_leader:
            model = model_in_files(model, "/proc/self/cwd", torch.float32)
        else:
            model.__class__ = Removing
        shard_from_leader(model, FsdpConfig(), world)
        world.gather(None)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_file_that_disappears_on_one_rank_ends_all(tmp_path):
    for rank in "01":
        make_lm().save_pretrained(tmp_path / rank)
    program = VANISHING.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    leader, follower = run_ranks_of(tmp_path, program, 2)
    assert follower.out[-1].startswith("UserError model.embed_tokens.weight cannot be read from /proc/self/cwd/model.")
    reason = "rank 0 of 2: rank 1 failed (UserError: model.embed_tokens.weight cannot be read from "
    assert reason in "".join([*leader.out, *leader.err]) and leader.err.count(leader.err[-1]) == 1
