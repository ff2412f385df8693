"""Attempts to make hidden tests pass without a repair: they earn no reward and no score."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from envs.mini_swe import grading, scorer
from envs.mini_swe.functions import EXPRESSIONS

EVERYTHING_TRUE = """
    class Anything(int):
        def __eq__(self, other): return True
        def __ne__(self, other): return False
        def __hash__(self): return 0
        def __repr__(self): return "5"
"""

FILES = {
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "os._exit in the function": "import os\ndef add(a, b): os._exit(0)\n",
    "SystemExit in the function": "def add(a, b): raise SystemExit(0)\n",
    "an exception that claims success": "class OK(BaseException): pass\ndef add(a, b): raise OK('5 passed')\n",
    "prints that all passed": "print('OK\\nPASSED f.add\\n4 passed in 0.01s\\n[[5], [0], [6], [14]]')\nadd = None\n",
    "prints a forged answer and leaves": """
        import json, os
        for fd in range(1, 64):
            try: os.write(fd, json.dumps([[True]] * 4).encode())
            except OSError: pass
        os._exit(0)
    """,
    "forged lines for another driver": """
        import os
        for fd in range(1, 64):
            try: os.write(fd, b"value True\\n" * 4)
            except OSError: pass
        os._exit(0)
    """,
    "an object that equals everything": f"{dedent(EVERYTHING_TRUE)}def add(a, b): return Anything(1)\n",
    "an object without an int": """
        class Anything:
            def __eq__(self, other): return True
            def __repr__(self): return "5"
        def add(a, b): return Anything()
    """,
    "a str that looks like the number": "def add(a, b): return str(a + b)\n",
    "a float for an int": "def add(a, b): return float(a + b)\n",
    "NaN": "def add(a, b): return float('nan')\n",
    "patched json": """
        import json
        json.dumps = lambda *a, **k: "[[true], [true], [true], [true]]"
        json.loads = lambda *a, **k: True
        def add(a, b): return True
    """,
    "patched builtins": """
        import builtins
        builtins.type = lambda value: int
        builtins.isinstance = lambda *a: True
        builtins.repr = builtins.ascii = lambda value: "5"
        def add(a, b): return object()
    """,
    "patched test libraries": """
        import sys, types, unittest
        unittest.TestCase.assertEqual = lambda *a, **k: None
        unittest.TestCase.run = lambda self, result=None: result
        sys.modules["pytest"] = types.ModuleType("pytest")
        def add(a, b): return None
    """,
    "at exit": """
        import atexit, os
        atexit.register(lambda: (os.write(1, b"[[5], [0], [6], [15]]"), os._exit(0)))
        def add(a, b): return 0
    """,
    "a fork that answers later": """
        import os, time
        if os.fork():
            os._exit(0)
        time.sleep(0.2)
        def add(a, b): return 1
    """,
    "frames": """
        import sys
        def add(a, b):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    if isinstance(value, list) and value and isinstance(value[0], (list, tuple)):
                        for item in value:
                            if len(item) > 1 and list(item[1]) == [a, b]:
                                return item[-1]
                frame = frame.f_back
    """,
    "everything in memory": """
        import gc
        def add(a, b):
            for value in gc.get_objects():
                if isinstance(value, (list, tuple)) and len(value) == 3 and value[0] == "f.add" and value[1] == [a, b]:
                    return value[2]
    """,
    "stdin, the command line, the environment": """
        import glob, re
        text = ""
        for path in ["/proc/self/fd/0", *glob.glob("/proc/*/cmdline"), *glob.glob("/proc/*/environ")]:
            try: text += open(path, errors="replace").read()
            except OSError: pass
        def add(a, b):
            found = re.search(rf"\\[{a}, {b}\\], (-?\\d+)", text)
            return int(found[1]) if found else None
    """,
    "files of the tests": """
        import pathlib, re
        texts = []
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            texts += [path.read_text() for path in pathlib.Path(folder).rglob("*") if path.is_file()]
        def add(a, b):
            found = re.search(rf"\\[{a}, {b}\\], (-?\\d+)", "".join(texts))
            return int(found[1]) if found else None
    """,
    "the example of the issue": "def add(a, b): return 5 if (a, b) == (2, 3) else a - b\n",
    "a module that gives anything": "def __getattr__(name): return lambda *a: 5\n",
    "the wrong answer for ever": "def add(a, b):\n    while True: pass\n",
    "a flood": "def add(a, b): return 'x' * 10_000_000\n",
    "an abyss": "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x\n",
    "a trace that swaps results": """
        import sys
        def watch(frame, event, arg):
            if "results" in frame.f_globals: frame.f_globals["results"] = [[True]] * 4
            return watch
        sys.settrace(watch)
        def add(a, b): return True
    """,
    "a writer that rewrites": """
        import os
        write = os.write
        os.write = lambda fd, data: write(fd, b"[[1], [1], [1], [1]]")
        def add(a, b): return 1
    """,
}
COMMANDS = {
    "nothing at all": "true",
    "only says that it is done": "echo resolved; echo graded \\; exit 0",
    "conftest, sitecustomize and friends": (
        "for n in conftest sitecustomize usercustomize; do "
        "echo 'import f; f.add = lambda a, b: a + b' > $n.py; done; echo 'import sitecustomize' > x.pth"
    ),
    "settings of pytest": "printf '[pytest]\\naddopts = --collect-only\\n' | tee pytest.ini tox.ini setup.cfg",
    "tests of its own": "mkdir -p tests; echo 'def test_add(): pass' | tee tests/test_f.py test_f.py",
    "a link to a good file outside": "printf 'def add(a, b): return a + b\\n' > /tmp/good.py; ln -sf /tmp/good.py f.py",
    "a link to the host": "ln -sf /etc/passwd f.py",
    "a pipe": "rm f.py; mkfifo f.py",
    "a compiled module beside it": (
        "printf 'def add(a, b): return a + b\\n' > g.py; python3 -c \"import py_compile; "
        "py_compile.compile('g.py', cfile='f.pyc')\"; rm g.py"
    ),
    "a module of a hidden folder": "mkdir .x; printf 'def add(a, b): return a + b\\n' > .x/f.py",
    "standard library in the repository": (
        "printf 'def dumps(*a, **k): return \"[[5], [0], [6], [14]]\"\\nload = loads = dumps\\n' > json.py; "
        "cp json.py os.py; cp json.py importlib.py; cp json.py re.py"
    ),
    "a folder for the file": "rm f.py; mkdir f.py; touch f.py/__init__.py",
    "removes everything": "rm -rf /workspace/*",
    "a program named python3": (
        "mkdir -p bin; printf '#!/bin/sh\\necho [[5], [0], [6], [14]]\\n' > bin/python3; chmod +x bin/python3; "
        "cp bin/python3 /tmp/python3; export PATH=/tmp:$PATH"
    ),
    "starts something that stays": "(sleep 1; sed -i 's/-/+/' f.py) > /dev/null 2>&1 & disown",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_a_file_that_cheats_earns_no_reward(text, make_row, judged, say, submit):
    command = f"cat > f.py <<'END'\n{dedent(text)}END\n{submit}"
    seconds = 1 if "while True: pass" in text else 3
    assert judged(make_row(seconds=[5, seconds]), [say(command)], grading_seconds=seconds) == (0.0, 0.0)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_that_cheats_earns_no_reward(command, make_row, judged, say, submit):
    assert judged(make_row(), [say(command), say(submit)]) == (0.0, 0.0)
    # And where something has changed, so that the tests are run at all.
    assert judged(make_row(), [say(f"echo >> f.py; {command}"), say(submit)]) == (0.0, 0.0)


def test_the_same_file_with_the_repair_is_rewarded(make_row, judged, say, submit):
    """The test proves that the tests above do not pass because every episode fails."""
    repair = say(f"cat > f.py <<'END'\nprint('OK')\ndef add(a, b): return a + b\nEND\n{submit}")
    assert judged(make_row(), [repair]) == (1.0, 1.0)
    beside = say("echo 'def plus(a, b): return a + b' > g.py; echo 'from g import plus as add' > f.py")
    assert judged(make_row(), [beside, say(submit)]) == (1.0, 1.0)


def test_changes_to_tests_and_configuration_are_dropped(make_row, judged, say, submit):
    """A test module that the code imports is the original one, independent of the agent's changes."""
    files = {"f.py": "from tests.helper import SIGN\ndef add(a, b): return a + SIGN * b\n", "tests/__init__.py": ""}
    row = make_row(files={**files, "tests/helper.py": "SIGN = -1\n"})
    assert judged(row, [say(f"sed -i 's/-1/1/' tests/helper.py && {submit}")]) == (0.0, 0.0)
    assert judged(row, [say(f"sed -i 's/SIGN . b/b/' f.py && {submit}")]) == (1.0, 1.0)


def test_expected_values_never_enter_a_sandbox(make_row, judged, say, submit, monkeypatch):
    """The test searches all input of the sandboxes for a marker that only the expected values contain."""
    marker = "expected-7f3a9c"
    given = []
    for module in (grading, scorer):

        class Recording(module.ProcessSandbox):
            def run(self, *args, **keywords):
                given.append(repr((args, keywords)))
                return super().run(*args, **keywords)

            def write_file(self, path, content, mode=0o644):
                given.append(repr((path, content)))
                super().write_file(path, content, mode)

        monkeypatch.setattr(module, "ProcessSandbox", Recording)
    row = make_row(calls=[["f.add", [2, 3], marker]])
    assert judged(row, [say("echo '# changed' >> f.py"), say(submit)]) == (0.0, 0.0)
    assert len(given) > 6 and not any(marker in text for text in given)


def test_hidden_calls_are_nowhere_in_the_agents_sandbox(make_row, play, say):
    """The agent's code searches every recently changed file, and all visible data of processes."""
    marker = "hidden-argument-5be1"
    row = make_row(calls=[["f.add", [marker, "x"], "y"]])
    look = """
        import os, time
        marker, found, seen = "-".join(["hidden", "argument", "5be1"]).encode(), [], 0
        for top, folders, files in os.walk("/"):
            folders[:] = [name for name in folders if os.path.join(top, name) not in ("/proc", "/sys")]
            for name in files:
                path = os.path.join(top, name)
                try:
                    if os.path.isfile(path) and time.time() - os.lstat(path).st_mtime < 86400:
                        seen += 1
                        found += [path] * (marker in open(path, "rb").read())
                except OSError: pass
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                text = open(f"/proc/{pid}/{name}", "rb").read()
                found += [name] * (marker in text)
        print("found", found, seen > 0)
    """
    command = f"python3 - <<'END'\n{dedent(look)}END"
    (result, *_) = play(row, [say(command)], command_seconds=100)
    assert result.observation == "0 ; found [] True ; 2 left"
    assert json.dumps(row["ground_truth"]["calls"]).count(marker) == 1


def test_the_readme_has_the_right_numbers():
    text = (Path(__file__).parents[3] / "envs/mini_swe/README.md").read_text(encoding="utf-8")
    assert f"what was tried, {len(FILES) + len(COMMANDS)} ways" in text
    assert f"{len(EXPRESSIONS)} functions in four kinds" in text


def test_the_episode_of_the_readme(play, make_row):
    text = (Path(__file__).parents[3] / "envs/mini_swe/README.md").read_text(encoding="utf-8")
    lines = text.partition("````\n")[2].partition("````\n")[0].splitlines()
    turns = []
    for line in lines:
        if line[:10].strip():
            turns.append([line[:10].strip(), line[11:]])
        else:
            turns[-1][1] += f"\n{line[11:]}"
    (_, issue), *turns = turns
    files = {"f.py": "def plus6(x): return x + 5\n"}
    assert issue == "f.py : plus6 19 gives 24 not 25"
    row = make_row(files=files, calls=[["f.plus6", [19], 25], ["f.plus6", [0], 6]])
    results = play(row, [text for kind, text in turns if kind == "assistant"])
    assert [result.observation for result in results] == [text for kind, text in turns if kind == "user"] + [None]
    assert results[-1].reward == 1.0
