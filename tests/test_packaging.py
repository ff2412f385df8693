"""The package: its files, its requirements, and forbidden content of the tree."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path

import pytest
import setuptools

from tests import forked

ROOT = Path(__file__).parent.parent
PACKAGES = ("mtrl", "envs", "conf", "hydra_plugins")
PROMISED_EXTRAS = {"vllm", "sglang", "wandb", "mlflow", "search", "swe", "sagemaker", "data", "dev"}
MODULES = {
    "hydra-core": "hydra",
    "faiss-cpu": "faiss",
    "mini-swe-agent": "minisweagent",
    "pytest-xdist": "xdist",
    "pre-commit": "pre_commit",
    "pydantic-ai-slim": "pydantic_ai",
    "strands-agents": "strands",
    "PyYAML": "yaml",
    "pillow": "PIL",
}
"""Distribution -> module, where the two differ."""
INSIDE = {
    "mtrl/engines/vllm/receiver.py": {"vllm"},
    "mtrl/engines/vllm/reload.py": {"vllm"},
    "mtrl/engines/sglang/torch_cpu.py": {"sglang"},
    "examples/agents/langchain_agent.py": {"langchain", "langchain_openai"},
    "examples/agents/openhands_program/mtrl_openhands.py": {"openhands"},
    "examples/agents/pydantic_ai_agent.py": {"pydantic_ai"},
    "examples/agents/rft_agent.py": {"sagemaker"},
    "examples/agents/smolagents_agent.py": {"smolagents"},
    "examples/agents/verifiers_program/mtrl_chat.py": {"verifiers"},
    "examples/agents/strands_agent.py": {"strands"},
    "examples/environments/gym_number.py": {"gymnasium"},
    "examples/environments/openenv_echo.py": {"openenv"},
    "examples/environments/skyrl_multiply.py": {"skyrl_gym"},
    "examples/environments/tinker_quiz.py": {"tinker_cookbook"},
    "examples/environments/verifiers_words.py": {"verifiers", "datasets"},
}
"""File that only the environment of an engine, or a user of another framework, imports -> packages installed there."""


def inside(path):
    return INSIDE.get(path.relative_to(ROOT).as_posix(), set())


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def project_files():
    """Yield every file of the tree except caches, environments and outputs of runs."""
    skipped = {"outputs", "multirun", "build", "dist", "__pycache__"}

    def belongs(name):
        hidden = name.startswith(".") and name not in (".ci", ".gitignore")
        return not (hidden or name in skipped or name.endswith(".egg-info"))

    for folder, folders, files in os.walk(ROOT):
        folders[:] = filter(belongs, folders)  # os.walk enters no other folder
        yield from (path for name in files if belongs(name) and (path := Path(folder, name)).is_file())


@pytest.mark.xdist_group("packaging")
def test_groups_of_tests_stay_together(request):
    """pytest-xdist groups tests by the end of their names, so that one worker makes expensive fixtures."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("only with pytest -n 2 --dist loadgroup, as make test does it")
    assert request.node.nodeid.endswith("@packaging"), "pytest and pytest-xdist do not fit together"


@pytest.fixture(scope="module")
def package():
    """The arguments with which setup.py calls setuptools."""
    with pytest.MonkeyPatch.context() as patch:
        arguments = {}
        patch.setattr(setuptools, "setup", lambda **keywords: arguments.update(keywords))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def modules_of(requirements):
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imports(tree, module_level=False):
    """Return the top-level names of imported modules; `TYPE_CHECKING` blocks do not count."""
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
        elif module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
    return found


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def parsed(*folders):
    return {path: tree_of(path) for path in python_files(*folders)}


def test_importing_mtrl_imports_no_torch():
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    code = f"import sys, mtrl, mtrl.types, mtrl.environments.base; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_optional_is_imported_at_module_level(package):
    base = modules_of(package["install_requires"])
    optional = set().union(*map(modules_of, package["extras_require"].values())) - base
    assert {"vllm", "sglang", "wandb", "mlflow", "faiss"} <= optional
    for path, tree in parsed(*PACKAGES, "scripts", "examples").items():
        assert not imports(tree, module_level=True) & optional - inside(path), path


def test_the_trainers_modules_import_no_engine():
    only_there = [path for path, modules in INSIDE.items() if modules & {"vllm", "sglang"}]
    code = (
        "import sys, mtrl.trainer.loop, mtrl.trainer.setup.servers, mtrl.evaluation.ready_models; "
        f"print([name for name in sys.modules if name.replace('.', '/') + '.py' in {only_there}])"
    )
    done = forked.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_imported_package_is_required(package):
    """The base contains imports at module level; the base or an extra contains those in functions."""
    base = modules_of(package["install_requires"])
    extras = {extra: modules_of(names) for extra, names in package["extras_require"].items() if extra != "dev"}
    own = {*PACKAGES, *sys.stdlib_module_names}
    for path, tree in parsed(*PACKAGES).items():
        assert imports(tree, module_level=True) <= base | own | inside(path), path
        assert imports(tree) <= base.union(own, inside(path), *extras.values()), path


def test_every_required_package_is_imported(package):
    """The base contains no unused package."""
    imported = set().union(*(imports(tree) for tree in parsed(*PACKAGES).values()))
    assert not modules_of(package["install_requires"]) - imported


def test_extras(package):
    extras = package["extras_require"]
    assert extras.keys() >= PROMISED_EXTRAS
    assert set(extras["data"]) <= set(extras["dev"])
    ranges = [
        *package["install_requires"],
        *(name for names in extras.values() for name in names if name not in extras["dev"]),
    ]
    assert all(">=" in requirement and "<" in requirement for requirement in ranges)


def test_extras_that_the_code_names_exist(package):
    named = {
        call.args[1].value
        for tree in parsed(*PACKAGES).values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "missing_extra"
    }
    assert named and named <= package["extras_require"].keys()


def test_every_folder_of_code_is_a_package():
    folders = {path.parent for path in python_files("mtrl", "envs")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, because setuptools builds inside the tree."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    (path,) = out.glob("mtrl_agents-*.whl")
    return path


def test_the_wheel_holds_code_configuration_and_licence(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".md", ".json", ".toml", ".sh", ".txt") and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert not [name for name in held if name.startswith(("tests/", "build/"))]


def test_the_wheel_composes_outside_of_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'site')!r}]; import mtrl.main as m; print(m.__file__); m.cli()"
    )
    command = [sys.executable, "-c", program, "--cfg", "job", "experiment=text_to_sql"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path)) and "name: text_to_sql" in done.stdout
    program = f"import sys; sys.path[:0] = [{str(tmp_path / 'site')!r}]; import mtrl.config.derived as m; " + (
        "print(m.engine_installation('vllm'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "python -m venv .venv-vllm && .venv-vllm/bin/pip install 'mtrl-agents[vllm]'\n"


@pytest.mark.slow
@pytest.mark.ci
def test_the_installed_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    """The installed wheel trains with the packages of this environment, without the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", "--no-compile", wheel], check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = subprocess.run(
        [python, "-c", "import mtrl; print(mtrl.__file__)"], cwd=empty, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(packages)), where
    command = [
        python.with_name("mtrl"),
        "train",
        "debug=fast",
        "trainer.max_steps=1",
        "preflight.at_start=none",
        "evaluation.before_train=false",
        "run_dir=run",
    ]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (empty / "run" / "summary.json").is_file() and (empty / "run" / "export" / "config.json").is_file()


def test_files_are_short():
    assert not {
        path: lines
        for path in project_files()
        if path.suffix == ".py" and (lines := path.read_text(encoding="utf-8").count("\n")) > 500
    }


def test_no_file_names_a_machine_or_a_registry():
    forbidden = re.compile(
        r"(?:^|[^\w.])/(?:work|farm|root|opt/wheels)/|\bpypi\.org|pythonhosted|download\.pytorch", re.MULTILINE
    )
    named = {}
    for path in project_files():
        if path.suffix in (".png", ".sqlite", ".safetensors", ".parquet") or path == Path(__file__):
            continue
        if found := forbidden.search(path.read_text(encoding="utf-8")):
            named[path] = found[0]
    assert not named


def test_the_lower_bounds_that_are_tested_are_those_of_the_package():
    lines = (ROOT / "requirements" / "lower-bounds.txt").read_text().splitlines()
    bounds = dict(line.split("==") for line in lines if not line.startswith("#"))
    required = {name: version for name, version in re.findall(r'"([\w-]+)>=([\d.]+),', (ROOT / "setup.py").read_text())}
    for name, version in bounds.items():
        assert version.startswith(required[name]), name
