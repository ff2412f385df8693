"""A program in place of docker and podman: it logs its arguments, and runs commands in a copy of the image's folder.

Its state is beside the program: `image/` (the initial files of every container), `log.jsonl`, and one folder per
container.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(sys.argv[0]).resolve().parent
COMMAND, *ARGUMENTS = sys.argv[1:]


def values(flag):
    return [ARGUMENTS[n + 1] for n, word in enumerate(ARGUMENTS) if word == flag]


def run():
    if (HOME / "no_image").exists():
        sys.exit("docker: manifest unknown")
    name = values("--name")[0]
    folder = HOME / "containers" / name
    shutil.copytree(HOME / "image", folder / "testbed", symlinks=True)
    (folder / "tmp").mkdir()
    (folder / "label").write_text(values("--label")[0])
    if (HOME / "dies_after_start").exists():
        sys.exit("docker: lost the connection")
    print(name)


def execute():
    words = ARGUMENTS[ARGUMENTS.index("-w") :]
    place, name, inside = words[1], words[2], words[3:]
    folder = HOME / "containers" / name
    if not folder.exists():
        sys.exit(f"Error: No such container: {name}")
    here = [word.replace("/tmp/", f"{folder}/tmp/").replace("/testbed", f"{folder}/testbed") for word in inside]
    os.environ["HOME"] = str(folder)
    done = subprocess.run(here, cwd=place.replace("/testbed", f"{folder}/testbed"))
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def container():
    """Answer `container inspect`: whether a container runs, or the number of its process, which this machine lacks."""
    asks_whether_it_runs = "Running" in values("--format")[0]
    print(str((HOME / "containers" / ARGUMENTS[-1]).exists()).lower() if asks_whether_it_runs else 0)


def ps():
    wanted = values("--filter")[0].removeprefix("label=")
    for folder in (HOME / "containers").iterdir():
        if (folder / "label").read_text() == wanted:
            print(folder.name)


def rm():
    for name in ARGUMENTS[1:]:
        shutil.rmtree(HOME / "containers" / name, ignore_errors=True)


with (HOME / "log.jsonl").open("a") as log:
    log.write(json.dumps([COMMAND, *ARGUMENTS]) + "\n")
{"run": run, "exec": execute, "ps": ps, "rm": rm, "container": container}[COMMAND]()
