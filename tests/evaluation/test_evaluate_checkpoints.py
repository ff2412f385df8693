"""Checkpoints of several ranks, and of adapters."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from mtrl.command.compose import compose
from mtrl.record.checksums import SUMS, add_checksums, checksums
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.checkpoint.tensors import read_tensors, tensor_names
from tests.evaluation.conftest import TASK
from tests.evaluation.outputs import trajectories_of
from tests.trainer.shard_ranks import on_ranks

FEW = ["evaluation.rows=2", "evaluation.sampled_rows=0", "evaluation.samples_per_row=1", "evaluation.output=out"]


def _write_again(source, target):
    """Write the tensors of a checkpoint of one process again, sharded over these ranks."""
    ranks = torch.arange(dist.get_world_size())
    tensors = {}
    for part in {name.partition(".")[0] for name in tensor_names(source)}:
        for name, tensor in read_tensors(source, part).items():
            spread = distribute_tensor(tensor, DeviceMesh("cpu", ranks), [Shard(0)]) if tensor.dim() else tensor
            tensors[f"{part}.{name}"] = spread
    Saver(dist.group.WORLD).save(tensors, target)


@pytest.mark.ci
def test_a_checkpoint_of_three_ranks_is_evaluated_by_one_process(evaluate, run, tmp_path):
    copy = tmp_path / "many"
    shutil.copytree(
        run, copy, ignore=shutil.ignore_patterns("trajectories", "export", "model.*", "optimizer.*", "tensors.json")
    )
    step = "checkpoints/step_000002"
    on_ranks(3, tmp_path, _write_again, run / step, copy / step)
    assert len(list((copy / step).glob("model-rank*.safetensors"))) == 3
    done = evaluate(f"{copy}/checkpoints/best", *FEW, f"evaluation.compare=[{run}/checkpoints/best]")
    assert done.status == 0, done.err
    one, two = trajectories_of(tmp_path / "out").values()
    assert one == two


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A finished run of two steps that trained adapters."""
    from mtrl.trainer.run import train

    folder = tmp_path_factory.mktemp("runs") / "adapted"
    words = ["model.lora_rank=4", "trainer.optimizer.lr=0.05", "tracker.plots=false", "preflight.at_start=none"]
    train(compose([*TASK, *words, "evaluation.before_train=false", f"run_dir={folder}"]))
    return folder


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_of_adapters_is_the_model_that_the_run_exported(evaluate, adapted, tmp_path):
    """The checkpoint has only adapters, which are merged into the initial model of the run."""
    latest = adapted / "checkpoints" / "step_000002"
    weights = read_tensors(latest, "model")
    assert weights and all(".lora_" in name for name in weights)
    done = evaluate(f"{adapted}/checkpoints/latest", *FEW, f"evaluation.compare=[{adapted}/export,base]")
    assert done.status == 0, done.err
    checkpoint, export, base = trajectories_of(tmp_path / "out").values()
    assert checkpoint == export != base


def test_a_checkpoint_that_does_not_fit_its_run_is_one_sentence(evaluate, run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("trajectories"))
    index = copy / "checkpoints" / "step_000002" / "tensors.json"
    entries = json.loads(index.read_text())
    index.write_text(json.dumps({name: entry for name, entry in entries.items() if "norm" not in name}))
    names = [line.split("  ")[1] for line in (index.parent / SUMS).read_text().splitlines()]
    (index.parent / SUMS).unlink()
    add_checksums(index.parent, checksums(index.parent, names))
    done = evaluate(f"{copy}/checkpoints/latest", "evaluation.output=out")
    assert done.status == 2 and "\n" not in done.err
    assert f"evaluation.model={copy}/checkpoints/latest cannot be loaded (weights do not fit" in done.err
