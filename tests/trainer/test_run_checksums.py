"""A bit that a disk or a copy changed anywhere in the folder of a finished run is found, by the name of its file."""

import random
import shutil
from contextlib import suppress

import pytest
from runs import finish, start

from mtrl.config.compose import compose
from mtrl.diagnose.__main__ import main as diagnose
from mtrl.errors import UserError
from mtrl.tracking.checksums import SUMS
from mtrl.trainer.checkpoint import read_checkpoint
from mtrl.trainer.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("checksums") / "run"
    finish(start(run))
    return run


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def found_in(run, name, capsys):
    """What is said of the run by whom reads the file."""
    if name.startswith("checkpoints/"):
        with pytest.raises(UserError) as refused:
            read_checkpoint((run / name).parent)
        return str(refused.value)
    with suppress(UserError):  # the flipped bit may make a file unreadable
        diagnose([str(run)])
    return capsys.readouterr().err


def test_twenty_flipped_bits_over_all_files_are_found_by_name(finished, capsys):
    whole = (file for file in finished.rglob("*") if file.is_file() and file.stat().st_size)
    files = sorted(file.relative_to(finished).as_posix() for file in whole)
    files = [name for name in files if name != "run.log" and not name.endswith(SUMS)]
    chance = random.Random(0)
    kinds = {name.split("/")[0]: name for name in chance.sample(files, len(files))}  # one of each folder at least
    chosen = [*kinds.values(), *chance.sample(files, max(0, 20 - len(kinds)))]
    assert len(chosen) >= 20 and {"config.yaml", "metrics.jsonl", "export", "checkpoints"} <= kinds.keys()
    for name in chosen:
        bit = chance.randrange(8 * (finished / name).stat().st_size)
        flip(finished / name, bit)
        said = found_in(finished, name, capsys)
        assert (name if not name.startswith("checkpoints/") else name.split("/")[-1]) in said
        flip(finished / name, bit)
    diagnose([str(finished)])
    assert "changed" not in capsys.readouterr().err


def test_a_changed_export_is_no_model(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = compose(["debug=fast"])
    load_model(config, str(run / "export"))
    flip(run / "export" / "model.safetensors", 8 * 100_000)
    with pytest.raises(UserError, match=r"export has changed since the end of its run \(export/model.safetensors: not"):
        load_model(config, str(run / "export"))
    (run / SUMS).unlink()
    load_model(config, str(run / "export"))


def test_a_resume_tells_what_has_changed_and_makes_the_checksums_anew(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace('"seed": 0', '"seed": 1'))
    output = finish(start(run, "resume=latest"))
    assert "summary.json: not as it was written" in " ".join(output.split())
    assert "summary.json: not" not in finish(start(run, "resume=latest"))
