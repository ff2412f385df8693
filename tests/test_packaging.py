"""What is installed, what it pulls in, and what the tree must never hold."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parent.parent
PACKAGES = ("mtrl", "envs", "conf", "hydra_plugins")
PROMISED_EXTRAS = {"vllm", "sglang", "wandb", "mlflow", "search", "swe", "sagemaker", "data", "dev"}
MODULES = {
    "hydra-core": "hydra",
    "faiss-cpu": "faiss",
    "mini-swe-agent": "minisweagent",
    "pytest-xdist": "xdist",
    "pre-commit": "pre_commit",
    "strands-agents": "strands",
    "PyYAML": "yaml",
}
"""Distribution -> module, where the two differ."""
INSIDE = {
    "mtrl/engines/vllm/receiver.py": {"vllm"},
    "mtrl/engines/vllm/reload.py": {"vllm"},
    "mtrl/engines/sglang/torch_cpu.py": {"sglang"},
    "examples/agents/langchain_agent.py": {"langchain", "langchain_openai"},
    "examples/agents/rft_agent.py": {"sagemaker"},
    "examples/agents/strands_agent.py": {"strands"},
}
"""What only an engine or an agent imports, where it is installed -> what it finds there."""


def inside(path):
    return INSIDE.get(path.relative_to(ROOT).as_posix(), set())


def python_files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def project_files():
    """Every file of the tree but caches, environments and what runs leave."""
    skipped = {"outputs", "multirun", "build", "dist", "__pycache__"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in parts)
        made = any(part in skipped or part.endswith(".egg-info") for part in parts)
        if path.is_file() and not hidden and not made:
            yield path


@pytest.mark.xdist_group("packaging")
def test_groups_of_tests_stay_together(request):
    """pytest-xdist sends tests to one worker by the end of their names; else each worker makes the dear fixtures."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("only with pytest -n 2 --dist loadgroup, as make test does it")
    assert request.node.nodeid.endswith("@packaging"), "pytest and pytest-xdist do not fit together"


@pytest.fixture(scope="module")
def package():
    """What setup.py hands to setuptools."""
    with pytest.MonkeyPatch.context() as patch:
        handed = {}
        patch.setattr(setuptools, "setup", lambda **keywords: handed.update(keywords))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return handed


def modules_of(requirements):
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imports(tree, module_level=False):
    """Top-level names of the modules that a file imports; `TYPE_CHECKING` blocks run nowhere and do not count."""
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


def parsed(*folders):
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files(*folders)}


def test_importing_mtrl_pulls_in_no_torch():
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


def test_the_trainers_side_of_engines_imports_none():
    only_there = [path for path, modules in INSIDE.items() if modules & {"vllm", "sglang"}]
    code = (
        "import sys, mtrl.trainer.loop, mtrl.trainer.setup.servers, mtrl.evaluation.ready_models; "
        f"print([name for name in sys.modules if name.replace('.', '/') + '.py' in {only_there}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_that_is_imported_is_required(package):
    """By the base at module level; by the base or an extra inside of functions."""
    base = modules_of(package["install_requires"])
    extras = {extra: modules_of(names) for extra, names in package["extras_require"].items() if extra != "dev"}
    own = {*PACKAGES, *sys.stdlib_module_names}
    for path, tree in parsed(*PACKAGES).items():
        assert imports(tree, module_level=True) <= base | own | inside(path), path
        assert imports(tree) <= base.union(own, inside(path), *extras.values()), path


def test_everything_that_is_required_is_imported(package):
    """The base is light: nothing stays in it by habit."""
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
        if path.suffix in (".py", ".yaml", ".md", ".json") and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert not [name for name in held if name.startswith(("tests/", "build/"))]


def test_the_wheel_composes_far_from_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'site')!r}]; import mtrl.main as m; print(m.__file__); m.cli()"
    )
    command = [sys.executable, "-c", program, "--cfg", "job", "experiment=text_to_sql"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path)) and "name: text_to_sql" in done.stdout


@pytest.mark.slow
def test_the_installed_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    """`pip install X.whl && mtrl train`, with the requirements of this environment and nothing of the checkout."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    subprocess.run(install, check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    where = subprocess.run(
        [python, "-c", "import mtrl; print(mtrl.__file__)"], cwd=empty, capture_output=True, text=True
    )
    assert where.stdout.startswith(str(packages)), where
    command = [python.with_name("mtrl"), "train", "debug=fast", "trainer.max_steps=1", "run_dir=run"]
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
