"""The files and packages that the Dockerfile names exist. Its build is not tested, since no test has Docker."""

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if re.match(r"[A-Z]+ ", line)]


def test_scripts_that_it_copies_and_runs_are_there():
    named = {path for kind, rest in STEPS if kind in ("COPY", "RUN") for path in re.findall(r"scripts/\w+\.sh", rest)}
    assert named == {"scripts/install.sh", "scripts/install_sandbox.sh", "scripts/system_package.sh"}
    assert all((ROOT / path).is_file() for path in named)


def test_it_trains_on_all_gpus_that_it_sees():
    """One process would use only the first GPU."""
    steps = dict(STEPS)
    assert json.loads(steps["ENTRYPOINT"]) == [f"{steps['WORKDIR']}/scripts/run_local.sh"]
    assert os.access(ROOT / "scripts" / "run_local.sh", os.X_OK)


def test_the_image_runs_without_root_and_its_packages_exist():
    kinds = [kind for kind, _ in STEPS]
    assert dict(STEPS)["USER"] == "mtrl" and kinds.index("USER") < kinds.index("ENTRYPOINT")
    (extras,) = re.findall(r'^EXTRAS="(.*)"$', "\n".join(rest for kind, rest in STEPS if kind == "ARG"), re.MULTILINE)
    assert all(f'"{extra}": ' in (ROOT / "setup.py").read_text(encoding="utf-8") for extra in extras.split())
