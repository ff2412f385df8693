"""Build the site of docs/ with MkDocs Material: python scripts/build_docs.py [--site FOLDER] [--serve]

Documents link to examples, environments and experiments, so the build copies these folders beside docs/. Warnings, such
as a link to a missing page or heading, are errors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
BESIDE = ("benchmarks", "conf", "envs", "examples", "experiments", "mtrl", "scripts", "tests")
"""Names of the folders that documents link to."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="default build/site")
    parser.add_argument("--serve", action="store_true", help="show it at http://127.0.0.1:8000 instead")
    args = parser.parse_args(argv)
    if find_spec("material") is None:
        print("MkDocs Material is not installed; pip install -e '.[docs]'", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        config = gather(Path(folder))
        words = ["serve"] if args.serve else ["build", "--strict", "--site-dir", str(args.site.resolve())]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # Material's notice about a successor
        command = [sys.executable, "-m", "mkdocs", *words, "--config-file", str(config)]
        try:
            status = subprocess.run(command, env=environment).returncode
        except KeyboardInterrupt:  # Ctrl-C ends --serve
            return 130
    if not status and not args.serve:
        print(f"the documents are at {args.site}/index.html")
    return status


def gather(folder: Path) -> Path:
    """Copy the sources of the site, and return the path of its configuration."""
    source = folder / "source"
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns("mkdocs.yml"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, source / name)
    for beside in BESIDE:
        for path in (ROOT / beside).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    config = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))
    written = folder / "mkdocs.yml"
    written.write_text(yaml.safe_dump({**config, "docs_dir": "source"}, sort_keys=False), encoding="utf-8")
    return written


if __name__ == "__main__":
    sys.exit(main())
