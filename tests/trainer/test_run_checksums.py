"""A changed bit anywhere in the folder of a finished run is reported with the name of its file."""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from runs import finish, start

from mtrl.command.compose import compose
from mtrl.diagnose.__main__ import main as diagnose
from mtrl.errors import UserError
from mtrl.record.checksums import SUMS
from mtrl.trainer.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]


@pytest.fixture(scope="module")
def finished(whole_run, tmp_path_factory):
    run = tmp_path_factory.mktemp("checksums") / "run"
    shutil.copytree(whole_run, run)
    return run


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def stderr_of_diagnose(run, capsys):
    """Return the program's stderr; a flipped bit may make a file unreadable."""
    with suppress(UserError):
        diagnose([str(run)])
    return capsys.readouterr().err


def test_twenty_flipped_bits_over_all_files_are_reported_by_file(finished, capsys):
    """`mtrl.diagnose` finds them in files of the run and of all its checkpoints."""
    whole = (file for file in finished.rglob("*") if file.is_file() and file.stat().st_size)
    files = sorted(file.relative_to(finished).as_posix() for file in whole)
    files = [name for name in files if name != "run.log" and not name.endswith(SUMS)]
    chance = random.Random(0)
    folders = {name.rpartition("/")[0] or name: name for name in chance.sample(files, len(files))}
    weights = [name for name in files if name.startswith("checkpoints/") and name.endswith(".safetensors")]
    chosen = dict.fromkeys([*folders.values(), *weights])
    others = [name for name in files if name not in chosen]
    chosen |= dict.fromkeys(chance.sample(others, max(0, 20 - len(chosen))))
    assert len({name.split("/")[1] for name in weights}) > 1, "older checkpoints as well"
    assert len(chosen) >= 20 and {"config.yaml", "metrics.jsonl", "export"} <= folders.keys()
    while chosen:
        once = {name.rpartition("/")[0]: name for name in chosen}  # one of each folder
        chosen = [name for name in chosen if name not in once.values()]
        bits = {name: chance.randrange(8 * (finished / name).stat().st_size) for name in once.values()}
        for name, bit in bits.items():
            flip(finished / name, bit)
        output = " ".join(stderr_of_diagnose(finished, capsys).split())
        for folder, name in once.items():
            expected = f"{folder}: {Path(name).name} is not as" if folder.startswith("checkpoints/") else name
            assert expected in output
            flip(finished / name, bits[name])
    assert "changed" not in stderr_of_diagnose(finished, capsys)


@pytest.mark.parametrize("bit", [3, 8 * 70], ids=["digest", "name"])
def test_a_flipped_bit_in_the_checksums_of_a_checkpoint_is_reported(finished, capsys, bit):
    sums = next(finished.glob(f"checkpoints/*/{SUMS}"))
    flip(sums, bit)
    output = stderr_of_diagnose(finished, capsys)
    flip(sums, bit)
    assert f"checkpoints/{sums.parent.name}: " in output


def test_a_changed_export_is_not_loaded(finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    config = compose(["debug=fast"])
    load_model(config, str(run / "export"))
    flip(run / "export" / "model.safetensors", 8 * 100_000)
    with pytest.raises(UserError, match=r"export has changed since the end of its run \(export/model.safetensors: not"):
        load_model(config, str(run / "export"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"model\.path=~/run/export has changed since the end of its run"):
        load_model(config, "~/run/export")
    (run / SUMS).unlink()
    load_model(config, str(run / "export"))


def test_a_resume_reports_changed_files_and_writes_new_checksums(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace('"seed": 0', '"seed": 1'))
    output = finish(start(run, "resume=latest"))
    assert "summary.json: not as it was written" in " ".join(output.split())
    assert "summary.json: not" not in finish(start(run, "resume=latest"))
