"""A repository in the format of SWE-bench's images, whose history holds the repair, and the row of its issue."""

import subprocess

from envs.mini_swe.swebench import swebench_row

GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
CHECK = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"
INSTANCE = {
    "instance_id": "Owner__repo-1",
    "repo": "owner/repo",
    "problem_statement": "add subtracts",
    "patch": "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
    "-    return a - b\n+    return a + b\n",
    "eval_script": CHECK,
}


def write_repository(folder):
    """Make the repository in an empty folder. A later commit with the repair is in another branch."""
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "test_calc.py").write_text("import calc\n\ndef test_old():\n    assert calc.add(0, 0) == 0\n")
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "base"], ["tag", "base"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    (folder / "calc.py").write_text("def add(a, b):\n    return a + b  # the future\n")
    subprocess.run([*GIT, "commit", "-qam", "the repair"], cwd=folder, check=True)
    subprocess.run([*GIT, "branch", "upstream"], cwd=folder, check=True)
    subprocess.run([*GIT, "reset", "-q", "--hard", "base"], cwd=folder, check=True)


def instance_row(**change):
    """The row of the instance, with other columns."""
    made = swebench_row({**INSTANCE, **change}, "train", 0, "docker")
    made["ground_truth"]["seconds"] = [20, 60]
    return made
